"""Plans of a resume on another pod: what is refused before anything changes."""

from pathlib import Path

import pytest

from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.errors import NotFoundError, VerificationError
from nsa_ops.runs.move import MoveRequest, is_elsewhere, newest_backup, plan_move
from nsa_ops.store import PodRecord, RunRecord
from tests.ops.backup.case import RUN_ID, Case, flip_bit


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40)
    store = case.operator.store
    store.save_run(RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c" * 64, 1.0))
    store.add_pod(PodRecord("there", "pod-2", "local", str(tmp_path / "2"), "python3", "cpu", 0.0))
    return case


def pull(case: Case, which: str = "all") -> None:
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, which))


def test_a_run_without_a_backup_cannot_leave_its_pod(case: Case) -> None:
    with pytest.raises(NotFoundError, match="is backed up here, so it cannot continue") as caught:
        plan_move(case.operator, MoveRequest(RUN_ID, "there"))
    assert f"nsa-ops backup pull {RUN_ID}" in caught.value.hint


def test_the_backup_with_the_newest_verified_checkpoint_is_taken(case: Case) -> None:
    pull(case)
    assert newest_backup(case.operator, RUN_ID).root == case.backup.root
    flip_bit(case.backup.run.checkpoint(40) / "checkpoint.json")
    assert newest_backup(case.operator, RUN_ID).root == case.backup.root


def test_a_backup_without_a_manifest_is_a_damaged_one(case: Case) -> None:
    pull(case)
    case.backup.run.manifest.write_text("{")
    with pytest.raises(VerificationError, match="cannot be used"):
        plan_move(case.operator, MoveRequest(RUN_ID, "there"))


def test_only_another_pod_is_elsewhere(case: Case) -> None:
    assert is_elsewhere(case.operator, RUN_ID, "there")
    assert not is_elsewhere(case.operator, RUN_ID, "here")
    with pytest.raises(NotFoundError):
        is_elsewhere(case.operator, RUN_ID, "nowhere")
