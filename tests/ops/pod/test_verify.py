"""The agent that hashes checkpoints passes over those that the run did not write."""

import hashlib
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    inspect_checkpoint,
)
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_ops.pod.read_run import list_checkpoint_facts
from nsa_ops.pod.verify import HashedCheckpoints, verify_newest

OWN, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "r1")
    run.root.mkdir()
    write_manifest(
        run,
        RunManifest(
            run_id="r1", attempt_id=OWN, config=RunConfig(), config_sha256="0", created_unix_s=1.0
        ),
    )
    save(run, 5)
    return run


def save(run, step: int, run_id: str = "r1", attempt: int = 1, attempt_id=OWN) -> None:
    run.checkpoint(step).mkdir(parents=True)
    (run.checkpoint(step) / "state.txt").write_bytes(b"1\n")
    file = CheckpointFile(name="state.txt", size=2, sha256=hashlib.sha256(b"1\n").hexdigest())
    manifest = CheckpointManifest(
        run_id=run_id, attempt=attempt, attempt_id=attempt_id, step=step, tokens_seen=1,
        created_unix_s=1.0, config_sha256="0", files=[file],
    )  # fmt: skip
    (run.checkpoint(step) / MANIFEST_NAME).write_text(manifest.model_dump_json())


@pytest.mark.parametrize(
    "foreign", [{"run_id": "r2"}, {"attempt": 2}, {"attempt_id": OTHER}], ids=str
)
def test_a_foreign_checkpoint_is_neither_the_newest_whole_one_nor_called_whole(
    run: RunDir, foreign
) -> None:
    save(run, 10, **foreign)
    found = HashedCheckpoints(checkpoints=list(verify_newest(run)))
    assert found.whole.step == 5
    assert "r1" in found.damaged[0]
    assert [(fact.step, fact.whole) for fact in list_checkpoint_facts(run)] == [
        (10, False), (5, True),
    ]  # fmt: skip


def test_the_agent_says_which_attempt_wrote_a_checkpoint(run: RunDir) -> None:
    found = inspect_checkpoint(run.checkpoint(5))
    assert (found.run_id, found.attempt, found.attempt_id) == ("r1", 1, OWN)


def test_a_run_whose_manifest_cannot_be_used_is_still_hashed(run: RunDir) -> None:
    run.manifest.write_text("{")
    assert HashedCheckpoints(checkpoints=list(verify_newest(run))).whole.step == 5
    assert list_checkpoint_facts(run)[0].whole
