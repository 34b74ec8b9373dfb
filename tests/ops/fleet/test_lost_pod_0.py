"""Pod 0 is gone: its newest verified backup becomes the run directory of another pod of the run."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, read_manifest
from nsa_core.rundir.process import identify
from nsa_ops.agents import read_run_manifest
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.restore import restore_to_pod
from nsa_ops.context import Operator
from nsa_ops.errors import ConfigurationError, PodUnreachableError, StateConflictError
from nsa_ops.fleet.resume import (
    FleetResumePlan,
    begin_on_pods,
    plan_fleet_resume,
)
from nsa_ops.fleet.source import FleetResumeRequest
from nsa_ops.pod.act import act
from nsa_ops.pod.messages import JoinAttemptAction, SetAsideAction
from nsa_ops.remote.local import LocalTransport
from nsa_ops.runs.attempt import ship_to
from nsa_ops.runs.choose import record_of
from nsa_ops.store import MemberPod, PodRecord
from tests.ops.backup.case import RUN_ID, Case
from tests.ops.fakes import FakeTransport
from tests.ops.pod.ends import record_process

SETS = ("runtime.device=cpu", "runtime.precision=fp32")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A run of pods `here` and `b` whose pod 0, `here`, was backed up and does not answer now."""
    case = Case(tmp_path)
    case.build(20, 40)
    link, store = case.link(), case.operator.store
    manifest = read_run_manifest(link, RUN_ID)
    store.save_run(record_of(link, manifest).with_others([MemberPod("b", "pod-b")]))
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "all"))
    root = tmp_path / "b"
    store.add_pod(PodRecord("b", "pod-b", "local", str(root), sys.executable, "cpu", 0.0))
    share = manifest.model_copy(
        update={"node": Node(rank=1, address="10.0.0.1", port=29500), "pod_id": "pod-b"}
    )
    asked = JoinAttemptAction(run_dir=root / "runs" / RUN_ID, manifest=share)
    assert act(asked.model_dump_json().encode()).code == 0
    return case


def without_pod_0(case: Case) -> Operator:
    """Only `b` answers, with real agents."""
    gone = FakeTransport({"": PodUnreachableError("here does not answer")})
    there = LocalTransport({"PATH": os.environ["PATH"], "HOME": str(case.root)})
    return replace(case.operator, connect=lambda pod, _settings: there if pod.name == "b" else gone)


def plan(case: Case) -> FleetResumePlan:
    overrides = {"preflight": "a trial", "dimensions": "a trial"}
    request = FleetResumeRequest(RUN_ID, ("b",), sets=SETS, overrides=overrides)
    return plan_fleet_resume(without_pod_0(case), request)


def test_the_backup_becomes_the_new_pod_0_and_its_share_is_kept(case: Case) -> None:
    planned = plan(case)
    assert (planned.source.step, planned.attempt) == (40, 2)
    assert [run.pod for run in planned.source.aside] == ["b"]
    assert (planned.moved_from, ", not on here" in planned.plan.title) == ("here", True)
    why = planned.members[0].manifest.overrides["old-pod"]
    assert why == "nobody could ask pod here: here does not answer"
    assert any(note.startswith("here does not answer") for note in planned.notes)
    begin_on_pods(without_pod_0(case), planned)
    runs = case.root / "b" / "runs"
    run = RunDir(runs / RUN_ID)
    manifest = read_manifest(run)
    assert (manifest.attempt, manifest.node, manifest.pod_id) == (2, Node(), "pod-b")
    assert [one.step for one in list_checkpoints(run)] == [40]
    kept = RunDir(runs / f".{RUN_ID}.pod1-attempt1")
    assert read_manifest(kept).node.rank == 1
    known = case.operator.store.find_run(RUN_ID)
    assert known is not None
    assert (known.pod, known.others, known.attempt) == ("b", (), 2)


def test_a_cut_after_the_restore_restores_nothing_twice(case: Case) -> None:
    first = plan(case)
    begin_on_pods(without_pod_0(case), first)
    again = plan(case)
    assert (again.is_begun, again.source.restore, again.source.aside) == (True, None, ())
    assert again.attempt == 2


def test_a_backup_of_another_model_becomes_no_pod_0(case: Case) -> None:
    """The plan refuses it, before anything is copied."""
    manifest = read_manifest(case.backup.run)
    model = manifest.config.model.model_copy(update={"num_layers": 3})
    wrote = manifest.config.model_copy(update={"model": model})
    (case.backup.run.checkpoint(40) / "config.json").write_text(wrote.model_dump_json())
    with pytest.raises(ConfigurationError, match=r"num_layers. is 3 there, not \d+"):
        plan(case)


def test_what_the_backup_passes_over_is_in_the_plan(case: Case) -> None:
    damaged = case.backup.run.checkpoint(40) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    planned = plan(case)
    assert planned.source.step == 20
    assert any("passed over: " in note and "step_000040" in note for note in planned.plan.notes)


def restore_only(case: Case) -> RunDir:
    """A resume that was cut after the restore, before the registry learned of it."""
    planned, operator = plan(case), without_pod_0(case)
    assert planned.source.restore is not None
    (share,) = planned.source.aside
    asked = SetAsideAction(run_dir=Path(share.run_dir))
    assert act(asked.model_dump_json().encode()).code == 0
    ship_to(operator, share.link, planned.snapshots["b"])
    restore_to_pod(share.link, planned.source.restore, operator.tell)
    return RunDir(Path(share.run_dir))


def test_a_restored_copy_is_used_with_the_checkpoints_that_it_has(case: Case) -> None:
    restore_only(case)
    again = plan(case)
    assert (again.source.copy_on, again.source.restore, again.source.step) == ("b", None, 40)
    assert (again.is_begun, again.attempt) == (False, 2)
    assert again.plan.title.startswith(f"Resume {RUN_ID} on b from step 40")


def test_a_restored_copy_that_has_less_than_the_backup_is_not_used(case: Case) -> None:
    copy = restore_only(case)
    copy.checkpoint(40).rename(copy.checkpoint(20))
    with pytest.raises(StateConflictError, match=r"shows step 0; the backup is at step 40") as told:
        plan(case)
    assert told.value.hint == "Move it away there, then repeat this"


def test_a_directory_without_a_manifest_is_to_be_moved_away(case: Case) -> None:
    (case.root / "b" / "runs" / RUN_ID / "manifest.json").unlink()
    with pytest.raises(StateConflictError, match="a restore replaces nothing") as told:
        plan(case)
    assert told.value.hint == "Move it away there, then repeat this"


def test_after_a_cut_what_differs_from_the_attempt_that_trained_is_told_again(case: Case) -> None:
    known = case.operator.store.find_run(RUN_ID)
    assert known is not None
    first = plan(case)
    begin_on_pods(without_pod_0(case), first)
    case.operator.store.save_run(known)  # cut off before the registry learned of it
    again = plan(case)
    assert again.is_begun
    assert "pod_id" in {one.key for one in first.differences}
    assert {one.key for one in again.differences} == {one.key for one in first.differences}


@pytest.mark.parametrize(
    ("is_alive", "said"), [(True, "is resuming on pod `b`"), (False, "from an earlier time")]
)
def test_an_attempt_that_was_begun_there_and_started_is_not_begun_again(
    case: Case, is_alive: bool, said: str
) -> None:
    store = case.operator.store
    known = store.find_run(RUN_ID)
    assert known is not None
    begin_on_pods(without_pod_0(case), plan(case))
    store.save_run(known)  # cut off before the registry learned of it
    assert (plan(case).is_begun, plan(case).source.restore) == (True, None)
    run = RunDir(case.root / "b" / "runs" / RUN_ID)
    own = identify(os.getpid())
    assert own is not None
    record_process(run, own if is_alive else own.model_copy(update={"start_ticks": 1}), attempt=2)
    with pytest.raises(StateConflictError, match=said):
        plan(case)


def test_a_run_directory_of_another_time_is_not_overwritten(case: Case) -> None:
    run = RunDir(case.root / "b" / "runs" / RUN_ID)
    manifest = read_manifest(run)
    other = manifest.model_copy(update={"node": Node(), "attempt_id": "ab" * 16})
    run.manifest.write_text(other.model_dump_json())
    with pytest.raises(StateConflictError, match="from an earlier time"):
        plan(case)
