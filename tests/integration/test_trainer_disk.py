"""A full disk: no torn checkpoint, no bare traceback, and nothing good is lost."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import inspect_checkpoint, list_checkpoints
from nsa_core.rundir.layout import RunDir
from tests.integration.trainer_runs import (
    events,
    exit_of,
    finish,
    losses,
    make_run,
    next_attempt,
    start,
    stderr,
    wait_for,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this machine refuses a tmpfs mount: {refused.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take every byte that is left."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (65_536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_a_disk_that_fills_up_halts_the_run_with_whole_checkpoints_and_it_resumes(
    small_disk: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(small_disk, shards, telemetry={"tensorboard": True})
    child = start(run)
    wait_for(lambda: events(run, "saved"))
    filler = fill(small_disk)
    assert child.wait() == 10
    ended = exit_of(run)
    assert ended.code == 10
    assert "No space left" in ended.reason
    assert ended.checkpoint_step is not None
    assert all(
        not inspect_checkpoint(checkpoint.path).damage for checkpoint in list_checkpoints(run)
    )
    said = stderr_of(run, small_disk)
    assert "Traceback" not in said

    filler.unlink()
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert losses(run) == losses(undisturbed)


def stderr_of(run, disk):
    """What was said; the file beside the run may itself have been cut by the full disk."""
    return run.log.read_text() + (disk / "runs" / f"{run.run_id}.stderr").read_text()


def test_a_disk_that_is_full_before_the_start_ends_in_one_clear_line(
    small_disk: Path, shards: Path
) -> None:
    run = make_run(small_disk, shards)
    filler = fill(small_disk)
    child = start(run)
    assert child.wait() == 93
    filler.unlink()
    assert not run.checkpoints.exists()


def test_a_save_that_fails_once_does_not_end_the_run(small_disk: Path, shards: Path) -> None:
    run = make_run(small_disk, shards, schedule={"steps": 60}, checkpoint={"save_every": 20})
    child = start(run)
    wait_for(lambda: events(run, "saved"))
    filler = fill(small_disk)
    wait_for(lambda: "save_failed" in stderr_of(run, small_disk) or not child.is_running())
    filler.unlink()
    assert child.wait() == 0, stderr(run)
    assert exit_of(run).checkpoint_step == 60
