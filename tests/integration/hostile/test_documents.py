"""JSON of a pod or of a backup that no parser should trust: a sentence, never a crash."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hostile.documents import DOCUMENTS, Document
from tests.integration.hostile.ended_run import (
    change_manifest,
    proper_files,
    read_manifest,
    write_checkpoint,
)
from tests.integration.hostile.judged import lacks, pull, told
from tests.integration.hostile.lying_pod import Side, World

pytestmark = pytest.mark.integration
every = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.id)
FEW = {"deep-closed", "not-utf8", "nan", "digits", "list", "spaces", "escape", "cut"}
few = pytest.mark.parametrize(
    "document", [one for one in DOCUMENTS if one.id in FEW], ids=lambda document: document.id
)


@every
def test_one_bad_manifest_among_three_blocks_no_good_one(world: World, document: Document) -> None:
    side = world.sides["near"]
    (side.checkpoint(20) / "checkpoint.json").write_bytes(document.content)
    heard, problems = pull(world, side, (9, 10))
    assert problems + lacks(side, 30) == [], f"{document.why}\n{heard.said}"
    assert not side.held(20).exists()


def changed_manifest(side: Side, number: int, changes: dict[str, Any]) -> None:
    folder = side.checkpoint(number)
    change_manifest(folder, read_manifest(folder) | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"extra": json.loads("[" * 900 + "]" * 900)},
        {"files": [{"name": f"f{n}", "size": 1, "sha256": "0" * 64} for n in range(200_000)]},
        {"files": []},
        {"files": {}},
        {"files": [None]},
        {"files": [["model.safetensors", 1, "0"]]},
        {"run_id": "n" * 10**7},
        {"step": "20"},
        {"step": -20},
        {"step": 2**80},
        {"created_unix_s": "yesterday"},
        {"tokens_seen": [[]]},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{str(next(iter(changes.values())))[:12]}",
)
def test_a_manifest_with_an_impossible_field_blocks_no_good_one(
    world: World, changes: dict[str, Any]
) -> None:
    side = world.sides["near"]
    changed_manifest(side, 20, changes)
    is_read = "extra" in changes or changes == {"step": "20"}
    heard, problems = pull(world, side, (0, 9, 10) if is_read else (9, 10))
    assert problems + lacks(side, 30) == [], heard.said


@pytest.mark.parametrize("key", ["files", "step", "run_id"])
def test_a_key_that_stands_twice_means_one_thing_only(world: World, key: str) -> None:
    side = world.sides["near"]
    path = side.checkpoint(20) / "checkpoint.json"
    other = {"files": [], "step": 21, "run_id": "other"}[key]
    path.write_text("{" + f'"{key}": {json.dumps(other)}, ' + path.read_text().lstrip()[1:])
    heard, problems = pull(world, side, (0, 9, 10))
    assert problems + lacks(side, 30) == [], heard.said


def test_a_manifest_of_a_later_version_is_whole_or_refused(world: World) -> None:
    side = world.sides["near"]
    changed_manifest(side, 20, {"schema_version": 999})
    heard, problems = pull(world, side, (0, 9, 10))
    assert problems + lacks(side, 30) == [], heard.said


@pytest.mark.parametrize(
    ("command", "document"),
    [
        (("status", "events")[number % 2], one)
        for number, one in enumerate(one for one in DOCUMENTS if one.id in FEW)
    ],
    ids=lambda one: one if isinstance(one, str) else one.id,
)
def test_an_agent_that_answers_nonsense_is_not_believed(
    world: World, command: str, document: Document
) -> None:
    side = world.sides["far"]
    shown = document.content.decode("latin-1")
    side.lie({"asked": "nsa_ops.pod.probe", "instead": shown, "code": 0})
    heard, problems = told(world, side, command, side.run_id, codes=(9,))
    assert side.num_lies, heard.said
    assert problems == [], f"{document.why}\n{heard.said}"


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (document, ("config.json", "model.safetensors")[number % 2])
        for number, document in enumerate(one for one in DOCUMENTS if one.id in FEW)
    ],
    ids=lambda one: one if isinstance(one, str) else one.id,
)
def test_a_checkpoint_that_holds_such_a_file_is_verified_in_words(
    world: World, document: Document, name: str
) -> None:
    """The hash is right, so it may be pulled; opening it may only find a difference."""
    side = world.sides["near"]
    content = document.content
    if name == "model.safetensors":
        content = len(content).to_bytes(8, "little") + content
    write_checkpoint(side.checkpoint(20), {**proper_files(20), name: content})
    heard, problems = pull(world, side, (0,), which="20")
    assert problems == [], heard.said
    opened, problems = told(world, side, "backup", "verify", side.run_id, "--load", codes=(0, 9))
    assert problems == [], f"{document.why}\n{opened.said}"
    is_json = document.id in {"list", "string", "null", "wide", "escape", "surrogate", "exponent"}
    if not (is_json and name == "config.json"):
        assert opened.code == 9 or document.id in {"nan", "digits"}, opened.said


@pytest.mark.parametrize(
    "name",
    ["metrics.json", "manifest.json", "exit.json", "events.jsonl", "heartbeat_rank0.jsonl",
     "training.csv", "watchdog.json", "samples.json"],
)  # fmt: skip
def test_a_report_of_a_run_with_such_a_file_is_written_or_refused(world: World, name: str) -> None:
    side = world.sides["near"]
    run = world.laptop / "received"
    shutil.copytree(side.run_dir, run)
    codes = (0, 2, 6, 7, 9)
    before = world.before(side)
    for document in (one for one in DOCUMENTS if one.id in {"deep-closed", "not-utf8"}):
        (run / name).write_bytes(document.content + b"\n")
        heard = world("report", str(run), "--out", "page.html")
        assert heard.problems(codes) == [], f"{document.why}\n{heard.said}"
    changed = world.harm(before, side, may_change=("work/page.*", "received/*"))
    assert changed == []


@few
def test_evidence_that_is_nonsense_is_judged_in_words(world: World, document: Document) -> None:
    path = Path(world.work / f"nvidia-smi.{'json' if len(document.id) % 2 else 'txt'}")
    path.write_bytes(document.content)
    heard = world("preflight", "--evidence", path.name)
    assert heard.problems((0, 2, 3, 6, 9, 11, 26)) == [], f"{document.why}\n{heard.said}"
