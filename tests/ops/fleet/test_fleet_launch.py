"""A launch on several pods: what its plan says and refuses, and that all are started or none."""

from dataclasses import replace
from functools import partial

import pytest

from nsa_core.rundir.manifest import KernelChoice
from nsa_ops.configure import RunChoice
from nsa_ops.errors import (
    ConfigurationError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.fleet.alike import require_same_kernels
from nsa_ops.fleet.launch import FleetPlan, execute_fleet, plan_fleet
from nsa_ops.pod.messages import JoinAttemptAction, PrepareRunAction, RunReport, SignalAction
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.runs.launch import LaunchRequest, ReadyPod, ready_pod
from nsa_ops.store import MemberPod
from tests.ops.fleet.pods import ScriptedPod, make_pods, operator_of
from tests.ops.operators import Desk
from tests.ops.runs.documents import RUN, beat, ended, report

CHOICE = RunChoice("tiny-cpu", "cpu", ("batch.accumulation=6",))
LAUNCH = LaunchRequest(CHOICE, run_id="r1", overrides={"preflight": "trial"})


@pytest.fixture
def pods(desk: Desk) -> list[ScriptedPod]:
    return make_pods(desk, "a", "b", "c")


def plan(
    desk: Desk,
    pods: list[ScriptedPod],
    names: str,
    launch: LaunchRequest = LAUNCH,
    port: int | None = None,
) -> FleetPlan:
    return plan_fleet(operator_of(desk, pods), launch, names.split(","), port)


def test_the_plan_shows_the_rank_map_and_changes_nothing(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    planned = plan(desk, pods, "a,b", port=31000)
    notes = planned.plan.notes
    assert notes[:2] == (
        "node 0: pod a, rank 0, 10.0.0.0 (eth0), all meet there on port 31000",
        "node 1: pod b, rank 1, 10.0.0.1 (eth0)",
    )
    assert any("slowest path: a reaches b with 100 MB/s; a step sends" in one for one in notes)
    assert any(one.startswith("every pod stages its own data") for one in notes)
    first, second = (one.manifest for one in planned.members)
    assert first.config.runtime.num_pods == 2
    assert (first.attempt_id, first.config_sha256) == (second.attempt_id, second.config_sha256)
    assert (second.node.rank, second.pod_id, second.node.interface) == (1, "id-b", "eth0")
    assert not any(pod.actions or pod.was_started for pod in pods)
    assert desk.store.open_intents() == []


def test_a_pod_that_others_do_not_reach_is_not_node_0(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[1].port_closed = {0}
    planned = plan(desk, pods, "a,b")
    assert [one.run.pod for one in planned.members] == ["b", "a"]
    assert planned.members[1].manifest.node.address == "10.0.0.1"


def test_a_checkpoint_of_the_first_pod_makes_that_one_node_0(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[1].port_closed = {0}
    launch = replace(LAUNCH, resume_from="step_000140")
    with pytest.raises(RefusedError, match="`b` cannot reach pod `a`"):
        plan(desk, pods, "a,b", launch)


def test_what_does_not_fit_together_is_refused_before_a_pod_is_asked(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    with pytest.raises(ConfigurationError, match="names 17 pods, and at most 16"):
        plan(desk, pods, ",".join(f"p{i}" for i in range(17)))
    sets = replace(LAUNCH, choice=replace(CHOICE, sets=(*CHOICE.sets, "runtime.num_pods=3")))
    with pytest.raises(ConfigurationError, match="contradicts the 2 pods that the run is to use"):
        plan(desk, pods, "a,b", sets)
    assert not any(pod.transport.asked for pod in pods)


def test_a_batch_that_does_not_divide_is_refused(desk: Desk, pods: list[ScriptedPod]) -> None:
    odd = replace(LAUNCH, choice=replace(CHOICE, sets=("batch.accumulation=5",)))
    with pytest.raises(ConfigurationError, match="5 does not divide among 2 ranks"):
        plan(desk, pods, "a,b", odd)


def test_pods_with_other_proven_kernels_are_refused(desk: Desk, pods: list[ScriptedPod]) -> None:
    operator, snapshot = operator_of(desk, pods), take_snapshot()

    def proven(pod: str, **names: str) -> ReadyPod:
        record = desk.store.find_pod(pod)
        assert record is not None
        ready = ready_pod(operator, LAUNCH, operator.link(record), snapshot)
        kernels = {branch: KernelChoice(name=name, reason="") for branch, name in names.items()}
        return replace(ready, proof=replace(ready.proof, kernels=kernels))

    require_same_kernels(proven("a", selected="triton"), proven("b", selected="triton"))
    with pytest.raises(RefusedError, match="triton for the selected branch on pod `a` and sdpa on"):
        require_same_kernels(proven("a", selected="triton"), proven("b", selected="sdpa"))
    with pytest.raises(RefusedError, match="nothing on pod `b`"):
        require_same_kernels(proven("a", selected="triton"), proven("b"))


def test_an_unreachable_pair_is_refused(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[1].blocked, pods[0].blocked = {0}, {1}
    with pytest.raises(RefusedError, match=r"Pod `b` cannot reach pod `a` on port 29500; tried"):
        plan(desk, pods, "a,b")


def test_a_run_that_is_on_other_pods_is_continued_by_resume(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    desk.store.save_run(replace(RUN, pod="a").with_others([MemberPod("b", "id-b")]))
    with pytest.raises(StateConflictError, match="is on pod `a`, `b`") as caught:
        plan(desk, pods, "a,c")
    assert "nsa-ops resume r1 --pods a,c" in caught.value.hint


def running(look: int) -> RunReport:
    if look == 0:
        return report("planned")
    return report("running", trainer_alive=True, watchdog_alive=True, last_beat=beat(look))


def test_all_pods_are_prepared_started_and_registered(desk: Desk, pods: list[ScriptedPod]) -> None:
    operator = operator_of(desk, pods)
    planned = plan(desk, pods, "a,b,c")
    for pod in pods:
        pod.script = running
    launched = execute_fleet(operator, planned)
    assert (launched.pod, launched.pods, launched.state) == ("a", ("a", "b", "c"), "running")
    assert launched.is_new
    (prepared,) = pods[0].actions
    assert isinstance(prepared, PrepareRunAction)
    for rank, pod in enumerate(pods[1:], start=1):
        (joined,) = pod.actions
        assert isinstance(joined, JoinAttemptAction)
        assert joined.manifest.attempt_id == prepared.manifest.attempt_id
        assert joined.manifest.node.rank == rank
    assert all(pod.was_started for pod in pods)
    known = desk.store.find_run("r1")
    assert known is not None
    assert [one.pod for one in known.members] == ["a", "b", "c"]
    assert desk.store.open_intents() == []


def failing(look: int) -> RunReport:
    if look == 0:
        return report("planned")
    return report("failed", exit=ended(14, "its text is not there"))


def stoppable(pod: ScriptedPod, look: int) -> RunReport:
    """Runs until it gets a signal."""
    if any(isinstance(one, SignalAction) for one in pod.actions):
        return report("halted", exit=ended(75, "stopped by SIGTERM"))
    return running(look)


def test_if_one_pod_fails_the_others_are_stopped_and_it_is_named(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    operator = operator_of(desk, pods)
    planned = plan(desk, pods, "a,b,c")
    pods[0].script, pods[2].script = partial(stoppable, pods[0]), partial(stoppable, pods[2])
    pods[1].script = failing
    with pytest.raises(ConfigurationError) as caught:
        execute_fleet(operator, planned)
    assert caught.value.message == ("Pod `b`: Run `r1` ended with code 14: its text is not there")
    assert "nsa-ops logs r1 --pod b" in caught.value.hint
    for pod in (pods[0], pods[2]):
        assert [one.signal for one in pod.actions if isinstance(one, SignalAction)] == ["TERM"]
    assert not any(isinstance(one, SignalAction) for one in pods[1].actions)
    assert "pod a was stopped with TERM" in desk.story


def test_a_pod_whose_runner_never_came_stops_the_others(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    operator = operator_of(desk, pods)
    planned = plan(desk, pods, "a,b")
    pods[0].script = partial(stoppable, pods[0])
    with pytest.raises(VerificationError, match="ended as soon as it was started"):
        execute_fleet(operator, planned)
    assert any(isinstance(one, SignalAction) for one in pods[0].actions)


def test_a_lost_link_stops_nothing_and_a_repeat_starts_the_rest(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    operator = operator_of(desk, pods)
    planned = plan(desk, pods, "a,b")
    pods[0].script = running
    pods[1].transport.answers["tmux"] = PodUnreachableError("b does not answer")
    with pytest.raises(PodUnreachableError):
        execute_fleet(operator, planned)
    assert not any(isinstance(one, SignalAction) for pod in pods for one in pod.actions)
    (intent,) = desk.store.open_intents()
    assert intent.details["pods"] == ["a", "b"]
    pods[1].transport.answers["tmux"] = pods[0].transport.answers["tmux"]
    pods[1].script, pods[1].num_looks = running, 0
    num_sessions = len(pods[0].transport.asked)
    again = plan(desk, pods, "a,b")
    assert again.plan.notes[1] == "node 1: pod b, rank 1, eth0"  # no address was probed for it
    assert execute_fleet(operator, again).state == "running"
    assert not any("new-session" in words for words in pods[0].transport.asked[num_sessions:])
    assert desk.store.open_intents() == []


def test_a_refused_join_leaves_nothing_running(desk: Desk, pods: list[ScriptedPod]) -> None:
    operator = operator_of(desk, pods)
    planned = plan(desk, pods, "a,b")
    pods[1].transport.answers["nsa_ops.pod.act"] = StateConflictError("another run is there")
    with pytest.raises(OpsError, match="another run is there"):
        execute_fleet(operator, planned)
    assert not any(pod.was_started for pod in pods)
