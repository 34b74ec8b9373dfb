"""May a run leave its pod? Decided by what the pod shows, or does not."""

from collections.abc import Mapping

import pytest

from nsa_ops.errors import RefusedError, StateConflictError
from nsa_ops.pod.messages import CheckpointFact
from nsa_ops.runs.lease import OLD_POD, OldPod, allow_leaving
from tests.ops.runs.documents import report

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


def test_a_finished_run_goes_on_only_with_more_steps() -> None:
    old = OldPod("a", report("finished"), is_gone=False)
    with pytest.raises(StateConflictError, match="finished on pod"):
        leave(old)
    assert leave(old, more=True)
