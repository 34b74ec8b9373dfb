"""Halt of a run on several pods: pod 0 is asked, and what does not follow is ended."""

from dataclasses import replace
from functools import partial

import pytest

from nsa_core.rundir.checkpoint import CheckpointState
from nsa_ops.errors import PartialError, PodUnreachableError, StateConflictError
from nsa_ops.fleet.halt import FleetHalted, execute_fleet_halt, plan_fleet_halt
from nsa_ops.pod.messages import HaltAction, RunReport, SignalAction
from nsa_ops.pod.verify import HashedCheckpoints
from nsa_ops.runs.halt import GRACE_S, Halted
from nsa_ops.store import MemberPod
from tests.ops.fakes import completed
from tests.ops.fleet.pods import ScriptedPod, make_pods, operator_of
from tests.ops.operators import Desk
from tests.ops.runs.documents import RUN, ended, report

RECORD = replace(RUN, pod="a", pod_id="id-a").with_others([MemberPod("b", "id-b")])
WHOLE = CheckpointState(path="/a/runs/r1/checkpoints/step_000007", step=7)


@pytest.fixture
def pods(desk: Desk) -> list[ScriptedPod]:
    pods = make_pods(desk, "a", "b")
    desk.store.save_run(RECORD)
    hashed = HashedCheckpoints(checkpoints=[WHOLE]).model_dump_json()
    pods[0].transport.answers["nsa_ops.pod.verify"] = completed(hashed)
    for pod in pods:
        pod.script = lambda _look: report("running")
    return pods


def stop(desk: Desk, pods: list[ScriptedPod]) -> FleetHalted:
    operator = operator_of(desk, pods)
    return execute_fleet_halt(operator, plan_fleet_halt(operator, RECORD, "enough"))


def halt(desk: Desk, pods: list[ScriptedPod]) -> Halted:
    stopped = stop(desk, pods)
    assert stopped.partial is None
    return stopped.halted


def halts_with(pods: list[ScriptedPod], _look: int) -> RunReport:
    """Ends once pod 0 was asked."""
    if pods[0].asked_for(HaltAction):
        return report("halted", exit=ended(10, "enough"))
    return report("running")


def ends_with_signal(pod: ScriptedPod, name: str, _look: int) -> RunReport:
    if name in [one.signal for one in pod.asked_for(SignalAction)]:
        return report("failed", exit=ended(-9, "killed"))
    return report("running")


def test_pod_0_is_asked_and_all_end(desk: Desk, pods: list[ScriptedPod]) -> None:
    for pod in pods:
        pod.script = partial(halts_with, pods)
    halted = halt(desk, pods)
    assert (halted.state, halted.signals, halted.was_running) == ("halted", [], True)
    assert halted.checkpoint == WHOLE
    assert [one.reason for one in pods[0].asked_for(HaltAction)] == ["enough"]
    assert pods[1].actions == []
    assert desk.store.open_intents() == []


def test_a_pod_that_was_never_started_is_not_waited_for(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[0].script = partial(halts_with, pods)
    pods[1].script = lambda _look: report("planned")
    halted = halt(desk, pods)
    assert (halted.state, halted.signals) == ("halted", [])
    assert halted.seconds < GRACE_S


def test_a_pod_that_does_not_follow_gets_term_then_kill(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[0].script = partial(halts_with, pods)
    pods[1].script = partial(ends_with_signal, pods[1], "KILL")
    halted = halt(desk, pods)
    assert halted.signals == ["TERM on b", "KILL on b"]
    assert halted.state == "failed"
    assert not pods[0].asked_for(SignalAction)


def test_a_run_that_was_restored_to_another_machine_of_that_name_is_halted_there(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    desk.store.replace_pod(replace(pods[0].record, pod_id="id-new"))
    for pod in pods:
        pod.script = partial(halts_with, pods)
    assert halt(desk, pods).state == "halted"
    assert [one.reason for one in pods[0].asked_for(HaltAction)] == ["enough"]


def test_where_pod_0_has_ended_the_others_are_ended(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[0].script = lambda _look: report("lost")
    pods[1].script = partial(ends_with_signal, pods[1], "TERM")
    assert halt(desk, pods).signals == ["TERM on b"]
    assert not pods[0].actions


def test_a_pod_that_does_not_answer_leaves_the_halt_partial(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[0].script = lambda _look: PodUnreachableError("a does not answer")
    pods[1].script = partial(ends_with_signal, pods[1], "TERM")
    with pytest.raises(PartialError, match=r"may live on pod `a` \(a does not answer\)") as caught:
        halt(desk, pods)
    assert "nsa-ops resume r1 --pods b" in caught.value.hint
    assert [one.signal for one in pods[1].asked_for(SignalAction)] == ["TERM"]


def test_the_checkpoint_is_shown_though_another_pod_says_nothing(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[0].script = partial(halts_with, pods)
    pods[1].script = lambda _look: PodUnreachableError("b does not answer")
    stopped = stop(desk, pods)
    assert (stopped.halted.checkpoint, stopped.halted.state) == (WHOLE, "halted")
    assert stopped.partial is not None
    assert "--pods a" in stopped.partial.hint


def test_a_run_of_which_nothing_lives_is_not_halted(desk: Desk, pods: list[ScriptedPod]) -> None:
    for pod in pods:
        pod.script = lambda _look: report("lost")
    with pytest.raises(StateConflictError, match="Nothing of run `r1` lives"):
        halt(desk, pods)
    for pod in pods:
        pod.script = lambda _look: PodUnreachableError("silent")
    with pytest.raises(PartialError, match="No pod of `r1` answers"):
        halt(desk, pods)


def test_a_halt_of_what_has_ended_changes_nothing(desk: Desk, pods: list[ScriptedPod]) -> None:
    for pod in pods:
        pod.script = lambda _look: report("halted", exit=ended(10, "before"))
    halted = halt(desk, pods)
    assert (halted.state, halted.was_running) == ("halted", False)
    assert not any(pod.actions for pod in pods)
