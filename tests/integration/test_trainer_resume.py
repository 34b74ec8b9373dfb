"""kill -9 at any moment, damage, rollback: the run continues exactly from a whole checkpoint."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint_files import TEMPORARY_PREFIX
from tests.integration.trainer_runs import (
    events,
    exit_of,
    finish,
    flip_bit,
    losses,
    make_run,
    next_attempt,
    rows,
    start,
    stderr,
    steps_logged,
    wait_for,
)

pytestmark = pytest.mark.integration


def kill_at_step(run, step) -> None:
    child = start(run)
    wait_for(lambda: steps_logged(run) >= step)
    child.kill()


def test_an_undisturbed_run_leaves_everything_it_should(undisturbed: RunDir) -> None:
    run = undisturbed
    assert exit_of(run).code == 0
    assert run.final_model.exists()
    assert [int(row["step"]) for row in rows(run.training_csv)] == list(range(1, 25))
    assert [int(row["step"]) for row in rows(run.validation_csv)] == [0, 12, 24]
    assert run.latest.read_text() == "step_000024\n"
    assert len(list_checkpoints(run)) == 3
    assert len(json.loads(run.samples.read_text())) == 2
    goodput = json.loads(run.goodput.read_text())
    assert abs(sum(goodput["buckets"].values()) - goodput["wall_s"]) < 1
    assert [event.kind for event in events(run, "ended")] == ["ended"]


@pytest.mark.parametrize("step", [2, 9])
def test_kill_9_before_and_after_a_checkpoint_changes_no_loss(
    tmp_path: Path, shards: Path, undisturbed: RunDir, step: int
) -> None:
    run = make_run(tmp_path, shards)
    kill_at_step(run, step)
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert losses(run) == losses(undisturbed)
    assert events(run, "resumed")
    assert [row["val_loss"] for row in rows(run.validation_csv)] == [
        row["val_loss"] for row in rows(undisturbed.validation_csv)
    ]


def kill_inside_a_save(run) -> None:
    """Stop the trainer when a temporary folder appears; kill it if the folder is still there."""
    child = start(run)
    while True:
        wait_for(lambda: list(run.checkpoints.glob(f"{TEMPORARY_PREFIX}*")), interval_s=0.0005)
        child.send(signal.SIGSTOP)
        if list(run.checkpoints.glob(f"{TEMPORARY_PREFIX}step_*")):
            child.kill()
            return
        child.send(signal.SIGCONT)
        assert child.is_running(), "no save could be interrupted"


def test_kill_9_inside_a_save_leaves_the_older_checkpoint_and_changes_no_loss(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    kill_inside_a_save(run)
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert events(run, "leftover_removed")
    assert losses(run) == losses(undisturbed)


def test_a_flipped_bit_is_rejected_loudly_and_the_next_older_checkpoint_is_used(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    child = start(run)
    wait_for((run.checkpoint(8) / "checkpoint.json").exists)
    child.kill()
    newest, older = (checkpoint.step for checkpoint in list_checkpoints(run)[:2])
    flip_bit(run.checkpoint(newest) / "optimizer.safetensors")
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    rejected = events(run, "checkpoint_rejected")
    assert f"step_{newest:06d}" in rejected[0].message
    assert events(run, "resumed")[0].facts["step"] == older
    assert losses(run) == losses(undisturbed)


def test_only_damaged_checkpoints_end_the_run_instead_of_a_fresh_start(
    tmp_path: Path, shards: Path
) -> None:
    run = make_run(tmp_path, shards)
    kill_at_step(run, 7)
    saved = list_checkpoints(run)
    for checkpoint in saved:
        (checkpoint.path / "checkpoint.json").unlink()
    before = losses(run)
    next_attempt(run)
    assert finish(run) == 15
    assert exit_of(run).reason.startswith(f"all {len(saved)} checkpoints are damaged")
    assert losses(run) == before


def link_to_a_read_error(path) -> None:
    """The beginning of /proc/self/mem cannot be read: EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def test_files_that_cannot_be_read_are_named_and_cost_only_themselves(
    tmp_path: Path, undisturbed: RunDir
) -> None:
    run = RunDir(tmp_path / "runs" / undisturbed.run_id)
    shutil.copytree(undisturbed.root, run.root)
    next_attempt(run)
    link_to_a_read_error(run.checkpoint(24) / "checkpoint.json")
    run.known_good.write_bytes(b"\xff\x00step")
    with run.training_csv.open("ab") as table:
        table.write(b"7" * 200_000 + b"\n\xff\x00,\n")
    run.validation_csv.write_text("step,val_loss\n12,a,b,c,d,e,f\n\u00b2,1,1,1,1,1,1\n")
    for path in (run.goodput, run.latest, run.halt, run.exit, run.reserve, run.stack_dump()):
        path.unlink(missing_ok=True)
        path.mkdir()
    link_to_a_read_error(run.metrics)
    assert finish(run) == 0, stderr(run)
    assert events(run, "resumed")[-1].facts["step"] == 20
    said = [event.message for event in events(run, "unreadable")]
    named = ("known_good", "goodput.json", "latest", ".HALT", "exit.json", ".reserve", "metrics")
    assert [name for name in named if not any(name in line for line in said)] == []
    assert "Input/output error" in events(run, "checkpoint_rejected")[0].message
    assert losses(run) == losses(undisturbed)
    assert [int(row["step"]) for row in rows(run.validation_csv)] == [24]
    assert exit_of(run).checkpoint_step == 24
    assert "Traceback" not in stderr(run)


def test_a_missing_resume_path_ends_in_one_clear_line(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    next_attempt(run, resume=str(tmp_path / "nowhere"))
    assert finish(run) == 15
    said = [line for line in stderr(run).splitlines() if line.startswith(("error:", "hint:"))]
    assert len(said) == 2
    assert "nowhere" in said[0]
    assert "Traceback" not in stderr(run)
    assert not run.checkpoints.exists()


def test_a_new_run_begins_from_another_runs_checkpoint(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    parent = undisturbed.checkpoint(16)
    run = make_run(tmp_path, shards, schedule={"steps": 18})
    next_attempt(run, resume=str(parent))
    assert finish(run) == 0, stderr(run)
    assert [row["step"] for row in rows(run.training_csv)] == ["17", "18"]
    assert "schedule.steps 24 -> 18" in events(run, "resumed")[0].message
    assert parent.exists()


def test_a_rollback_sets_later_checkpoints_aside_and_a_restart_goes_on_from_its_own(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    assert finish(run) == 0
    next_attempt(run, resume=str(run.checkpoint(16)))
    child = start(run)
    wait_for(lambda: run.latest.read_text() == "step_000020\n" and events(run, "set_aside"))
    wait_for(lambda: run.checkpoint(20).exists())
    child.kill()
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    steps = [event.facts["step"] for event in events(run, "resumed")]
    assert steps[0] == 16
    assert steps[1] >= 20
    assert losses(run) == losses(undisturbed)
    assert (run.checkpoints / "aside_attempt2_step_000024").is_dir()


def test_torn_lines_are_recorded_and_no_step_is_logged_twice(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    kill_at_step(run, 6)
    with run.heartbeat().open("a") as beats, run.training_csv.open("a") as table:
        beats.write('{"schema_version": 1, "run_')
        table.write("7,1234,5.1")
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert len(events(run, "torn_line")) == 2
    assert losses(run) == losses(undisturbed)


def test_a_kill_between_the_last_checkpoint_and_the_end_is_made_good(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    assert finish(run) == 0
    run.exit.unlink()
    run.final_model.unlink()
    run.samples.unlink()
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert run.final_model.exists()
    assert run.samples.exists()
    assert losses(run) == losses(undisturbed)
    assert len(events(run, "saved")) == 6


def test_a_new_run_on_other_data_begins_at_its_first_sample(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    text = tmp_path / "other.jsonl"
    text.write_text((shards / "text.jsonl").read_text()[40_000:].partition("\n")[2])
    run = make_run(tmp_path, shards, data={"path": str(text)}, schedule={"steps": 17})
    next_attempt(run, resume=str(undisturbed.checkpoint(16)))
    assert finish(run) == 0, stderr(run)
    assert events(run, "data_restarted")
    assert [row["step"] for row in rows(run.training_csv)] == ["17"]
