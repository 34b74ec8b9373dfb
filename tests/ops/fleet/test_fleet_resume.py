"""Resume of a run on several pods: on the same, on fewer, on a spare, and without its pod 0."""

from dataclasses import replace
from typing import Any

import pytest

from nsa_core.config.recipe import resolve
from nsa_core.rundir.checkpoint import CheckpointState
from nsa_core.rundir.manifest import Node, RunManifest, new_attempt_id
from nsa_ops.errors import (
    ConfigurationError,
    DeadlineError,
    LocalResourceError,
    NotFoundError,
    PodUnreachableError,
    StateConflictError,
)
from nsa_ops.fleet.resume import (
    FleetResumePlan,
    execute_fleet_resume,
    plan_fleet_resume,
)
from nsa_ops.fleet.source import FleetResumeRequest
from nsa_ops.pod.messages import JoinAttemptAction, NextAttemptAction, RunReport, SignalAction
from nsa_ops.pod.verify import HashedCheckpoints
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.runs.lease import left_pods
from nsa_ops.store import MemberPod
from tests.ops.fakes import completed
from tests.ops.fleet.pods import ScriptedPod, make_pods, operator_of
from tests.ops.operators import Desk
from tests.ops.runs.documents import RUN, beat, ended, report

SETS = ("batch.accumulation=6", "runtime.num_pods=2", "runtime.sharding=ddp")
CONFIG = resolve("tiny-cpu", "cpu", SETS)
WHOLE = CheckpointState(path="/a/runs/r1/checkpoints/step_000007", step=7)


@pytest.fixture
def pods(desk: Desk) -> list[ScriptedPod]:
    """Pods a and b had the run, which was halted; c is a spare."""
    pods = make_pods(desk, "a", "b", "c")
    code_id, attempt_id = take_snapshot().code_id, new_attempt_id()
    record = replace(RUN, pod="a", pod_id="id-a", code_id=code_id, attempt=1, attempt_id=attempt_id)
    desk.store.save_run(record.with_others([MemberPod("b", "id-b")]))
    for rank, pod in enumerate(pods[:2]):
        node = Node(rank=rank, address="10.0.0.0", port=31000, interface="eth0")
        pod.write(
            RunManifest(
                run_id="r1", attempt_id=attempt_id, config=CONFIG.config, node=node, profile="cpu",
                config_sha256=CONFIG.sha256, code_id=code_id, pod_id=pod.record.pod_id,
                overrides={"preflight": "trial"}, pod_facts={"cards": pod.name},
                created_unix_s=1.0,
            )
        )  # fmt: skip
        pod.script = lambda _look: halted()
    pods[2].script = lambda _look: NotFoundError("it is not there")
    hashed = HashedCheckpoints(checkpoints=[WHOLE]).model_dump_json()
    pods[0].transport.answers["nsa_ops.pod.verify"] = completed(hashed)
    pods[0].transport.files[f"{WHOLE.path}/config.json"] = CONFIG.config.model_dump_json().encode()
    return pods


def halted(**fields: Any) -> RunReport:
    return report("halted", exit=ended(10, "enough"), **fields)


def plan(desk: Desk, known: list[ScriptedPod], **asked: Any) -> FleetResumePlan:
    overrides = {"preflight": "trial"} | asked.pop("overrides", {})
    request = FleetResumeRequest("r1", overrides=overrides, **asked)
    return plan_fleet_resume(operator_of(desk, known), request)


def start_when_begun(pods: list[ScriptedPod]) -> None:
    """Each pod shows its attempt as planned once it is begun there, then as running."""
    for pod in pods:
        looks = iter(range(1000))

        def script(_look: int, pod: ScriptedPod = pod, looks: Any = looks) -> RunReport:
            attempt = pod.manifest.attempt
            summary = report().manifest.model_copy(update={"attempt": attempt})
            if next(looks) == 0:
                return report("planned", manifest=summary)
            return report("running", manifest=summary, trainer_alive=True, last_beat=beat(9))

        pod.script = script


def test_all_pods_continue_from_the_checkpoint_of_pod_0(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    planned = plan(desk, pods)
    assert [one.run.pod for one in planned.members] == ["a", "b"]
    assert (planned.source.step, planned.attempt, planned.differences) == (7, 2, [])
    assert any("all meet there on port 31000" in note for note in planned.plan.notes)
    start_when_begun(pods[:2])
    resumed = execute_fleet_resume(operator_of(desk, pods), planned)
    assert (resumed.attempt, resumed.from_step, resumed.pods) == (2, 7, ("a", "b"))
    assert resumed.checkpoint == WHOLE.path
    (asked,) = pods[0].asked_for(NextAttemptAction)
    assert asked.from_attempt == 1
    (joined,) = pods[1].asked_for(JoinAttemptAction)
    assert joined.manifest.attempt_id == pods[0].manifest.attempt_id
    assert (joined.manifest.node.rank, joined.manifest.pod_facts) == (1, {"cards": "b"})
    known = desk.store.find_run("r1")
    assert known is not None
    assert (known.attempt, known.attempt_id) == (2, pods[0].manifest.attempt_id)


def test_a_full_disk_of_pod_0_refuses_the_attempt_and_that_of_another_pod_does_not(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[1].script = lambda _look: halted(disk_free_bytes=0)
    assert plan(desk, pods).attempt == 2
    pods[0].script = lambda _look: halted(disk_free_bytes=2**20)
    with pytest.raises(LocalResourceError, match=r"pod `a`.* has 1 MiB free.* needs 5\.46 MiB"):
        plan(desk, pods)
    manifest = pods[0].manifest
    pods[0].write(manifest.model_copy(update={"overrides": {"preflight": "x", "disk": "quota"}}))
    assert plan(desk, pods).attempt == 2


def test_what_is_left_continues_without_a_lost_pod(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[1].script = lambda _look: PodUnreachableError("b does not answer")
    with pytest.raises(PodUnreachableError, match="Pod `b` cannot be asked") as caught:
        plan(desk, pods)
    assert "nsa-ops resume r1 --pods a`" in caught.value.hint
    planned = plan(desk, pods, pods=("a",))
    assert [change.key for change in planned.differences] == ["runtime.num_pods"]
    assert any(note.startswith("b does not answer") for note in planned.notes)
    start_when_begun(pods[:1])
    execute_fleet_resume(operator_of(desk, pods), planned)
    manifest = pods[0].manifest
    assert (manifest.config.runtime.num_pods, manifest.node) == (1, Node())
    known = desk.store.find_run("r1")
    assert known is not None
    assert known.others == ()
    assert [pod for pod, _ in left_pods(desk.store, "r1")] == ["b"]


def test_each_lost_pod_is_remembered_for_its_own_reason_and_the_manifest_stays_small(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    known = desk.store.find_run("r1")
    assert known is not None
    desk.store.save_run(known.with_others([MemberPod("b", "id-b"), MemberPod("c", "id-c")]))
    pods[1].script = lambda _look: PodUnreachableError("b does not answer")
    pods[2].script = lambda _look: PodUnreachableError("c says " + "x" * 100_000)
    planned = plan(desk, pods, pods=("a",))
    ground = planned.members[0].manifest.overrides["old-pod"]
    assert ground.startswith("nobody could ask pod b: b does not answer; nobody could ask pod c: c")
    assert len(ground) < 1000
    start_when_begun(pods[:1])
    execute_fleet_resume(operator_of(desk, pods), planned)
    reasons = dict(left_pods(desk.store, "r1"))
    assert (reasons["b"], reasons["c"][:7]) == ("b does not answer", "c says ")


def test_on_one_pod_a_slow_start_is_left_as_it_is(desk: Desk, pods: list[ScriptedPod]) -> None:
    planned = plan(desk, pods, pods=("a",))
    start_when_begun(pods[:1])
    shown = pods[0].script

    def script(look: int) -> RunReport | Exception:
        seen = shown(look)
        assert isinstance(seen, RunReport)
        return seen.model_copy(update={"state": "starting", "last_beat": None})

    pods[0].script = script
    with pytest.raises(DeadlineError, match="Waited 300 s for the start of `r1`"):
        execute_fleet_resume(operator_of(desk, pods), planned)
    assert pods[0].asked_for(SignalAction) == []


def test_a_spare_takes_the_place_of_a_lost_pod(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[1].script = lambda _look: PodUnreachableError("b does not answer")
    planned = plan(desk, pods, pods=("c", "a"))
    assert [one.run.pod for one in planned.members] == ["a", "c"]
    assert planned.differences == []
    start_when_begun([pods[0], pods[2]])
    execute_fleet_resume(operator_of(desk, pods), planned)
    assert (pods[2].manifest.node.rank, pods[2].manifest.pod_id) == (1, "id-c")


def test_nothing_begins_beside_a_living_share(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[1].script = lambda _look: report("running", trainer_alive=True)
    for names in ((), ("a",), ("a", "c")):
        with pytest.raises(StateConflictError, match="on pod `b`"):
            plan(desk, pods, pods=names)
    assert not any(pod.actions for pod in pods)


def test_a_batch_or_a_number_that_does_not_fit_the_pods_is_refused(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    with pytest.raises(ConfigurationError, match=r"^--set: batch\.accumulation 4 does not divide"):
        plan(desk, pods, pods=("a", "b", "c"), sets=("batch.accumulation=4",))
    for names in (("a",), ("a", "b")):
        with pytest.raises(ConfigurationError, match=r"`--set runtime\.num_pods=3` contradicts"):
            plan(desk, pods, pods=names, sets=("runtime.num_pods=3",))


def test_fewer_steps_than_are_trained_are_refused(desk: Desk, pods: list[ScriptedPod]) -> None:
    with pytest.raises(ConfigurationError, match="Nothing is left to train at step 7"):
        plan(desk, pods, sets=("schedule.steps=6",))
    assert plan(desk, pods, sets=("schedule.steps=7",)).source.step == 7  # it has to end
    pods[0].script = lambda _look: report("finished", exit=ended(0, "finished"))
    with pytest.raises(ConfigurationError, match="Nothing is left to train at step 7"):
        plan(desk, pods, sets=("schedule.steps=7",))


def test_another_model_than_the_weights_are_of_is_refused(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    for names in ((), ("a", "c")):  # also with a pod that never had the run
        with pytest.raises(
            ConfigurationError, match=r"another model: .model\.num_layers. is \d+ there"
        ):
            plan(desk, pods, pods=names, sets=("model.num_layers=3",))
    afresh = plan(desk, pods, sets=("model.num_layers=3",), afresh=True)
    assert afresh.members[0].manifest.config.model.num_layers == 3


def test_pod_0_is_left_only_with_a_backup(desk: Desk, pods: list[ScriptedPod]) -> None:
    pods[0].script = lambda _look: PodUnreachableError("a does not answer")
    with pytest.raises(NotFoundError, match="Nothing of `r1` is backed up here"):
        plan(desk, pods, pods=("b", "c"))
    with pytest.raises(ConfigurationError, match="begins at the newest backup"):
        plan(desk, pods, pods=("b", "c"), afresh=True)


def test_a_pod_without_the_code_of_the_run_is_refused(desk: Desk, pods: list[ScriptedPod]) -> None:
    for pod in pods[:2]:
        pod.write(pod.manifest.model_copy(update={"code_id": "0" * 16}))
    pods[2].transport.answers["sys.exit(not"] = completed(exit_code=1)
    with pytest.raises(ConfigurationError, match="Pod `c` lacks code 0000"):
        plan(desk, pods, pods=("a", "c"))


def test_an_attempt_that_was_begun_before_a_cut_only_starts(
    desk: Desk, pods: list[ScriptedPod]
) -> None:
    pods[0].script = lambda _look: report("planned")
    planned = plan(desk, pods)
    assert (planned.is_begun, planned.attempt) == (True, 1)
    start_when_begun(pods[:2])
    execute_fleet_resume(operator_of(desk, pods), planned)
    assert pods[0].asked_for(NextAttemptAction) == []
    assert len(pods[1].asked_for(JoinAttemptAction)) == 1
