"""A pod gives its files names that lead elsewhere: refused alone, and the good ones come."""

import json
import os
from pathlib import Path

import pytest

from tests.integration.hostile.ended_run import MARKER, change_manifest, read_manifest
from tests.integration.hostile.judged import lacks, pull, rename, same
from tests.integration.hostile.lying_pod import World
from tests.integration.hostile.names import IN_CHECKPOINT, NAMES, REFUSED, Name

pytestmark = pytest.mark.integration
#: The local transport goes the same way once a name is listed.
ON_THIS_MACHINE = {"absolute", "nul", "record"}
#: Names that may be brought, or that lead to what was verified: what is held is verified again.
VERIFIED_AGAIN = {"record", "part", "in-a-good-checkpoint", "good-manifest", "parents"}


def of_this_laptop(world: World, name: Name) -> bytes:
    return name.lie.replace(b"<HOME>", bytes(world.home))


# Every second one: tests/core/rundir/test_names.py judges all kinds without a pod.
@pytest.mark.parametrize("name", NAMES[::2], ids=lambda name: name.id)
def test_a_name_in_the_listing_over_ssh_leads_nowhere_else(world: World, name: Name) -> None:
    check_listed_name(world, "far", name)


@pytest.mark.parametrize(
    "name", [one for one in NAMES if one.id in ON_THIS_MACHINE], ids=lambda name: name.id
)
def test_a_name_in_the_listing_of_a_local_pod_leads_nowhere_else(world: World, name: Name) -> None:
    check_listed_name(world, "near", name)


def check_listed_name(world: World, side_name: str, name: Name) -> None:
    side = world.sides[side_name]
    side.lie(rename(side, of_this_laptop(world, name)))
    heard, problems = pull(world, side, name.codes)
    assert side.num_lies, f"the pod was not asked: {heard.said}"
    assert problems + lacks(side, 20, 30) == [], f"{name.why}\n{heard.said}"
    if name.id in VERIFIED_AGAIN:
        verified = world("backup", "verify", side.run_id, "--load")
        assert verified.problems([0]) == [], verified.said


@pytest.mark.parametrize("name", IN_CHECKPOINT, ids=lambda name: name.id)
def test_a_name_in_a_checkpoint_leads_nowhere_else(world: World, name: Name) -> None:
    side = world.sides["near"]
    manifest = read_manifest(side.checkpoint(20))
    manifest["files"][2]["name"] = of_this_laptop(world, name).decode("utf-8", "surrogateescape")
    change_manifest(side.checkpoint(20), manifest)
    heard, problems = pull(world, side, REFUSED)
    assert problems + lacks(side, 30) == [], f"{name.why}\n{heard.said}"
    assert not side.held(20).exists()


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
def test_a_manifest_that_lists_itself_or_a_file_twice_is_refused(world: World, name: str) -> None:
    side = world.sides["near"]
    manifest = read_manifest(side.checkpoint(20))
    twin = next((one for one in manifest["files"] if one["name"] == name), manifest["files"][0])
    manifest["files"].append(twin | {"name": name, "sha256": "0" * 64})
    change_manifest(side.checkpoint(20), manifest)
    heard, problems = pull(world, side, REFUSED)
    assert problems + lacks(side, 30) == [], heard.said
    assert not side.held(20).exists()


@pytest.mark.parametrize(
    "raw", [b"evil-\xff.txt", b"evil\n.txt", b"evil\x1b[2J.txt"], ids=["not-utf8", "newline", "esc"]
)
def test_a_real_file_of_such_a_name_is_refused_alone(world: World, raw: bytes) -> None:
    side = world.sides["near"]
    with open(bytes(side.run_dir) + b"/" + raw, "wb") as file:  # noqa: PTH123 (bytes as a name)
        file.write(b"content\n")
    heard, problems = pull(world, side, REFUSED)
    assert problems + lacks(side, 20, 30) == [], heard.said


def test_a_run_that_holds_a_tree_deeper_than_any_path_is_still_pulled(world: World) -> None:
    side = world.sides["near"]
    back = os.open(".", os.O_RDONLY)
    try:
        os.chdir(side.run_dir)
        for _ in range(2500):
            os.mkdir("dd")  # noqa: PTH102 (no path can say it)
            os.chdir("dd")
        Path("deep.txt").touch()
    finally:
        os.fchdir(back)
        os.close(back)
    heard, problems = pull(world, side, (0, 9, 10))
    assert problems + lacks(side, 20, 30) == [], heard.said


def test_twins_of_one_name_do_not_mix(world: World) -> None:
    side = world.sides["near"]
    twins = {"Twin.txt": "a", "twin.txt": "b", "caf\u00e9.txt": "c", "cafe\u0301.txt": "d"}
    for name, content in twins.items():
        (side.run_dir / name).write_text(content)
    heard, problems = pull(world, side, (0, 9, 10))
    assert problems + lacks(side, 20, 30) == [], heard.said
    for name, content in twins.items():
        here = side.backup / name
        assert not here.exists() or here.read_text() == content, name


def test_what_was_refused_once_does_not_hinder_the_next_pull(world: World) -> None:
    side = world.sides["far"]
    for lie in (b"backup.json", b"../../evil.txt", b"evil\x1b.txt"):
        side.lie(rename(side, lie))
        pull(world, side, (0, 9, 10))
    side.be_honest()
    heard, problems = pull(world, side, [0])
    assert problems == [], heard.said
    assert same(side, MARKER)


def test_refused_names_are_reported_and_counted_as_not_brought(world: World) -> None:
    side = world.sides["far"]
    side.lie(rename(side, b"../../evil.txt"))
    heard, problems = pull(world, side, REFUSED)
    assert problems == [], heard.said
    assert b"evil.txt" in heard.err
    assert b"evil.txt" not in (side.backup / "backup.json").read_bytes()
    record = json.loads((side.backup / "backup.json").read_bytes())
    assert "manifest.json" in {one["name"] for one in record["files"]}
