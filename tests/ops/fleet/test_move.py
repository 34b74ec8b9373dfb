"""When a run may leave its pod, and what a move to another one refuses."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.errors import NotFoundError, RefusedError, StateConflictError, VerificationError
from nsa_ops.fleet.move import is_elsewhere, newest_backup
from nsa_ops.fleet.resume import plan_fleet_resume
from nsa_ops.fleet.source import FleetResumeRequest
from nsa_ops.pod.messages import CheckpointFact
from nsa_ops.runs.lease import OLD_POD, OldPod, allow_leaving
from nsa_ops.runs.resume import next_attempt_action
from nsa_ops.store import PodRecord, RunRecord
from tests.ops.backup.case import RUN_ID, Case, flip_bit
from tests.ops.runs.documents import report

RUN = RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c" * 64, 1.0)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40)
    store = case.operator.store
    store.save_run(RUN)
    store.add_pod(PodRecord("there", "pod-2", "local", str(tmp_path / "2"), "python3", "cpu", 0.0))
    return case


def pull(case: Case, which: str = "all") -> None:
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, which))


def test_a_run_without_a_backup_cannot_leave_its_pod(case: Case) -> None:
    with pytest.raises(NotFoundError, match="is backed up here, so it cannot continue") as caught:
        plan_fleet_resume(case.operator, FleetResumeRequest(RUN_ID, ("there",)))
    assert f"nsa-ops backup pull {RUN_ID}" in caught.value.hint


def test_the_backup_with_the_newest_verified_checkpoint_is_taken(case: Case) -> None:
    pull(case)
    assert newest_backup(case.operator, RUN_ID).root == case.backup.root
    flip_bit(case.backup.run.checkpoint(40) / "checkpoint.json")
    assert newest_backup(case.operator, RUN_ID).root == case.backup.root


def test_a_backup_of_what_the_run_went_back_behind_is_not_the_newest(tmp_path: Path) -> None:
    """Another folder has a lower step of the attempt that goes on."""
    case = Case(tmp_path)
    builder = case.build(20, 40)
    pull(case)
    for step in (20, 40):
        shutil.rmtree(case.run.checkpoint(step))
    builder.resume().event("resumed", step=0)
    builder.save(10)
    link, other = case.link(), BackupFolder(case.root / "others" / RUN_ID)
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, other, "all"))
    assert newest_backup(case.operator, RUN_ID).root == other.root


def test_a_backup_without_a_manifest_is_a_damaged_one(case: Case) -> None:
    pull(case)
    case.backup.run.manifest.write_text("{")
    with pytest.raises(VerificationError, match="cannot be used"):
        plan_fleet_resume(case.operator, FleetResumeRequest(RUN_ID, ("there",)))


def test_only_another_pod_is_elsewhere(case: Case) -> None:
    assert is_elsewhere(case.operator, RUN, "there")
    assert not is_elsewhere(case.operator, RUN, "here")
    with pytest.raises(NotFoundError):
        is_elsewhere(case.operator, RUN, "nowhere")


def test_a_secret_in_the_command_of_a_move_does_not_leave_this_laptop() -> None:
    old = RunManifest(run_id=RUN_ID, config=RunConfig(), config_sha256="", created_unix_s=1.0)
    typed = ["nsa-ops", "resume", "--override", "old-pod=its token is hf_" + "a1" * 17]
    new = old.model_copy(update={"command": typed, "attempt": 2})
    asked = next_attempt_action(Path("/pod/runs") / RUN_ID, 1, old, new)
    assert asked.changes == {"command": [*typed[:3], "old-pod=its token is [redacted]"]}


CHECKPOINTS = [CheckpointFact(name="step_000040", step=40, size_bytes=1, whole=True)]


def leave(
    old: OldPod,
    backup_step: int = 40,
    overrides: Mapping[str, str] | None = None,
    more: bool = False,
) -> list[str]:
    return allow_leaving(old, "r1", backup_step, overrides or {}, more_steps=more)


@pytest.mark.parametrize("state", ["running", "staging", "starting", "halting", "resuming"])
def test_a_run_that_runs_on_a_reachable_pod_is_never_started_twice(state: str) -> None:
    old = OldPod("a", report(state), is_gone=False)
    with pytest.raises(StateConflictError, match="Two trainers of one run") as caught:
        leave(old, overrides={OLD_POD: "I know better"})
    assert "nsa-ops halt r1" in caught.value.hint


def test_a_gone_pod_is_left_with_a_warning() -> None:
    old = OldPod("a", None, is_gone=True, problem="a does not answer")
    (note,) = leave(old)
    assert "if it comes back and still trains, halt the run there" in note


def test_an_ended_run_with_nothing_newer_may_go() -> None:
    old = OldPod("a", report("halted", checkpoints=CHECKPOINTS), is_gone=False)
    assert leave(old) == ["pod `a` answers; the run is halted there"]


def test_newer_checkpoints_on_the_old_pod_are_not_left_behind_unasked() -> None:
    old = OldPod("a", report("lost", checkpoints=CHECKPOINTS), is_gone=False)
    with pytest.raises(RefusedError, match=r"step 40; the newest verified backup is step 20") as no:
        leave(old, backup_step=20)
    assert "nsa-ops backup pull r1" in no.value.hint
    (note,) = leave(old, backup_step=20, overrides={OLD_POD: "its disk is slow"})
    assert note.endswith("overridden: its disk is slow")


def test_a_pod_that_answers_and_cannot_tell_is_no_gone_pod() -> None:
    old = OldPod("a", None, is_gone=False, problem="it does not let us in")
    with pytest.raises(RefusedError, match="cannot tell whether `r1` still runs"):
        leave(old)
    assert leave(old, overrides={OLD_POD: "terminated at the provider"})


def test_a_finished_run_continues_only_with_more_steps() -> None:
    old = OldPod("a", report("finished"), is_gone=False)
    with pytest.raises(StateConflictError, match="finished on pod"):
        leave(old)
    assert leave(old, more=True)
