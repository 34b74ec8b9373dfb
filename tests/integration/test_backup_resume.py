"""A run that a gone pod took with it goes on from its backup, and loses no bit."""

import shutil
from pathlib import Path, PurePosixPath

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.restore import plan_restore, restore_here
from nsa_ops.report.record import read_record
from nsa_ops.report.write import write_report
from tests.integration.trainer_runs import (
    finish,
    losses,
    make_run,
    next_attempt,
    start,
    stderr,
    wait_for,
)
from tests.ops.backup.case import Case

pytestmark = pytest.mark.integration


def test_a_run_restored_from_its_backup_equals_an_undisturbed_one(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    case = Case(tmp_path)
    lost = make_run(tmp_path / "pod", shards)
    child = start(lost)
    wait_for(lost.checkpoint(8).is_dir)  # written beside the steps, so a step says nothing of it
    child.kill()
    backup = case.backup_of(lost.run_id)
    link = case.link()
    pulled = execute_pull(case.operator, link, plan_pull(link, lost.run_id, backup, "latest"))
    assert 8 <= pulled.newest_step < 24
    shutil.rmtree(lost.root)
    restore_here(plan_restore(backup, PurePosixPath(tmp_path / "pod" / "runs")))
    next_attempt(lost)
    assert finish(lost) == 0, stderr(lost)
    assert losses(lost) == losses(undisturbed)


def test_the_report_finds_everything_that_the_trainer_writes(
    tmp_path: Path, undisturbed: RunDir
) -> None:
    record = read_record(undisturbed)
    for name in ("loss", "lr", "grad_norm", "tokens_per_s"):
        assert record.training is not None
        assert record.training.column(name), name
    assert record.validation is not None
    assert [step for step, _ in record.validation.column("bits_per_byte")] == [0, 12, 24]
    assert sum(record.goodput_s.values()) > 0
    assert any(beat.gate_branch_shares for beat in record.beats)
    assert not any(state.damage for state in record.checkpoints)
    assert len(record.samples) == 2
    assert record.missing == []
    page = write_report(undisturbed.root, out=tmp_path, now_unix_s=0.0).page.read_text()
    assert "Not recorded" not in page
