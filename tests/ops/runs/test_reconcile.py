"""Acts that were cut off: each is compared with what is true, and settled once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.halt import HaltRequest
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.errors import PodUnreachableError
from nsa_ops.pod.messages import HaltAction, SignalAction
from nsa_ops.runs.members import MemberReport, merge
from nsa_ops.runs.reconcile import Truth, decide, execute_reconcile, plan_reconcile, unsettled
from nsa_ops.store import Intent, MemberPod
from tests.ops.cli_case import CommandLine
from tests.ops.fakes import completed
from tests.ops.fleet.pods import make_pods, operator_of
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, answer, report

HALT = HaltRequest(run_id="r1", attempt=1, reason="x", by="operator", at=1.0)


def intent(act: str, **detail: Any) -> Intent:
    return Intent(1, 1.0, act, "r1", json.dumps(detail), None, None)


def truth(state: str = "", attempt: int = 1, pod_id: str = POD.pod_id, **more: Any) -> Truth:
    if not state:
        return Truth(pod=POD, run=RUN)
    seen = report(state, **{k: more.pop(k) for k in ("halt",) if k in more})
    shown = {"attempt": attempt, "pod_id": pod_id, "node_rank": more.pop("node_rank", 0)}
    manifest = seen.manifest.model_copy(update=shown)
    return Truth(
        pod=POD, report=seen.model_copy(update={"manifest": manifest}), **({"run": RUN} | more)
    )


MOVED = {"pod": POD.name, "moved_from": "gone", "from_attempt": 1}


@pytest.mark.parametrize(
    ("begun", "true", "way"),
    [
        (intent("launch"), Truth(is_held=True), "wait"),
        (intent("launch"), Truth(problem="no answer"), "wait"),
        (intent("launch"), Truth(run=RUN), "rolled back"),
        (intent("launch"), truth(), "rolled back"),
        (intent("launch"), truth("planned"), "start"),
        (intent("launch"), truth("running"), "done"),
        (intent("launch"), truth("running", run=None), "adopt"),
        (intent("launch"), truth("failed"), "done"),
        (intent("resume", from_attempt=1), truth("halted", attempt=1), "rolled back"),
        (intent("resume", from_attempt=1), truth("planned", attempt=2), "start"),
        (intent("resume", from_attempt=1), truth("running", attempt=2), "done"),
        (intent("resume", **MOVED), truth("preempted", pod_id="other"), "rolled back"),
        (intent("resume", **MOVED), truth("planned", attempt=2), "start"),
        (intent("resume", **MOVED), truth("halted", attempt=2, node_rank=1), "rolled back"),
        (
            intent("resume", **MOVED),
            truth("running", attempt=2, run=replace(RUN, pod="gone")),
            "adopt",
        ),
        (intent("halt"), truth("running"), "rolled back"),
        (intent("halt"), truth("running", halt=HALT), "done"),
        (intent("halt"), truth("halted"), "done"),
        (intent("leave pod"), truth("running"), "halt"),
        (intent("leave pod"), truth("preempted"), "done"),
        (intent("leave pod"), truth(), "done"),
        (intent("backup pull"), Truth(), "rolled back"),
        (intent("pod add", pod_id="pod-1"), Truth(pod=POD), "done"),
        (intent("pod add", pod_id="pod-9"), Truth(), "rolled back"),
        (intent("pod rm"), Truth(), "done"),
        (intent("pod rm"), Truth(pod=POD), "rolled back"),
        (intent("pod trust", pod_id="pod-9"), Truth(pod=POD), "rolled back"),
    ],
)
def test_an_act_is_settled_by_what_is_true(begun: Intent, true: Truth, way: str) -> None:
    assert decide(begun, true).way == way


def manifest_of(run_id: str) -> bytes:
    manifest = RunManifest(
        run_id=run_id, config=RunConfig(), config_sha256="s", profile="cpu", code_id="code-1",
        pod_id=POD.pod_id, created_unix_s=5.0,
    )  # fmt: skip
    return manifest.model_dump_json().encode()


def cut_off(desk: Desk, act: str, **detail: Any) -> None:
    with (
        pytest.raises(PodUnreachableError),
        desk.store.intent(act, "r1", pod=POD.name, code_id="code-1", **detail),
    ):
        message = "the link was lost"
        raise PodUnreachableError(message)


def pod_shows(desk: Desk, state: str) -> None:
    shown = report(state)
    desk.transport.answers = {
        "CODE_ID": completed(), "nsa_ops.pod.probe": answer(shown), "list-panes": completed(),
        "new-session": completed(), "new-window": completed(),
    }  # fmt: skip
    desk.transport.files["/pod/runs/r1/manifest.json"] = manifest_of("r1")


def started(desk: Desk) -> list[str]:
    return [words[-1] for words in desk.transport.asked if "new-session" in words]


def test_a_run_whose_answer_was_lost_is_adopted_and_not_started_again(desk: Desk) -> None:
    cut_off(desk, "launch")
    pod_shows(desk, "running")
    (settled,) = execute_reconcile(desk.operator, plan_reconcile(desk.operator))
    assert settled.way == "adopt"
    assert started(desk) == []
    found = desk.store.find_run("r1")
    assert found is not None
    assert (found.pod, found.code_id, found.launched_unix_s) == (POD.name, "code-1", 5.0)
    assert execute_reconcile(desk.operator, plan_reconcile(desk.operator)) == []


def test_a_prepared_run_is_started_with_the_module_that_was_asked_for(desk: Desk) -> None:
    cut_off(desk, "launch", module="my.trainer")
    pod_shows(desk, "planned")
    (settled,) = execute_reconcile(desk.operator, plan_reconcile(desk.operator))
    assert settled.way == "start"
    assert started(desk) == ["my.trainer"]


def test_a_pod_that_does_not_answer_leaves_the_act_open(desk: Desk) -> None:
    cut_off(desk, "launch")
    desk.transport.answers = {"CODE_ID": PodUnreachableError("it does not answer")}
    settled = execute_reconcile(desk.operator, plan_reconcile(desk.operator))
    assert [one.way for one in settled] == ["wait"]
    refusal = unsettled(settled)
    assert refusal is not None
    assert refusal.exit_code == 10
    assert len(desk.store.open_intents()) == 1


def test_what_cannot_be_done_stays_open_and_the_next_act_is_settled(desk: Desk) -> None:
    cut_off(desk, "launch")
    pod_shows(desk, "planned")
    desk.transport.answers["new-session"] = completed(exit_code=1, stderr="no room")
    desk.store.leave_open("backup pull", "r1")
    settled = execute_reconcile(desk.operator, plan_reconcile(desk.operator))
    assert [one.way for one in settled] == ["wait", "rolled back"]
    assert "no room" in settled[0].found
    assert [one.act for one in desk.store.open_intents()] == ["launch"]


def test_reconcile_shows_a_plan_and_ends_with_10_while_something_is_open(
    cli: CommandLine, own_settings: Path
) -> None:
    assert cli("reconcile").out == "no command was interrupted\n"
    from nsa_ops.store import Store

    store = Store(own_settings / "state" / "registry.sqlite")
    store.leave_open("backup pull", "r1")
    planned = cli("reconcile", "--plan")
    assert "backup pull r1" in planned.out
    assert len(store.open_intents()) == 1
    assert "repeat it, and it continues there" in cli("reconcile", "-y").out
    assert store.open_intents() == []
    store.close()


@pytest.mark.parametrize(
    ("first", "other", "way"),
    [
        ("planned", "planned", "start"),
        ("running", "planned", "start"),
        ("planned", "running", "start"),
        ("running", "running", "done"),
        ("halted", "halted", "done"),
        ("failed", "planned", "done"),
        ("planned", None, "rolled back"),
        ("running", None, "wait"),
        ("planned", "halted at attempt 1", "rolled back"),
    ],
)
def test_a_start_on_several_pods_is_finished_on_all_or_rolled_back(
    first: str, other: str | None, way: str
) -> None:
    begun = intent("resume", pod=POD.name, pods=[POD.name, "b"], from_attempt=1)
    seen = truth(first, attempt=2).report
    there = truth(other.split()[0], attempt=1 if "at" in other else 2).report if other else None
    assert seen is not None
    member = MemberReport("b", 1, there)
    both = merge(seen, POD.name, [member] if there else [])
    found = decide(begun, Truth(pod=POD, run=RUN, report=both, others=(member,)))
    assert found.way == way, found


def test_the_rest_of_the_pods_is_started_and_all_are_registered(desk: Desk) -> None:
    first, other = make_pods(desk, "a", "b")
    operator = operator_of(desk, [first, other])
    detail = {"pod": "a", "pods": ["a", "b"], "code_id": "code-1", "module": "a.trainer"}
    desk.store.leave_open("launch", "r1", **detail)
    first.write(
        RunManifest(
            run_id="r1", config=RunConfig(), config_sha256="s", code_id="code-1", created_unix_s=1.0
        )
    )
    first.script = lambda _look: report("running")
    other.script = lambda _look: report("planned")
    (settled,) = execute_reconcile(operator, plan_reconcile(operator))
    assert (settled.way, "never started on pod `b`" in settled.found) == ("start", True)
    assert (first.was_started, other.was_started) == (False, True)
    known = desk.store.find_run("r1")
    assert known is not None
    assert [one.pod for one in known.members] == ["a", "b"]


def test_pods_that_an_attempt_left_are_no_longer_of_the_run(desk: Desk) -> None:
    gone, other, new = make_pods(desk, "a", "b", "c")
    operator = operator_of(desk, [gone, other, new])
    shown = report("planned")
    there = shown.manifest.model_copy(update={"pod_id": new.record.pod_id})
    desk.store.save_run(replace(RUN, pod="a", pod_id="").with_others([MemberPod("b", "")]))
    moved = {"pod": "c", "pods": ["c"], "code_id": "code-1", "moved_from": "a", "from_attempt": 0}
    desk.store.leave_open("resume", "r1", **moved)
    new.write(
        RunManifest(
            run_id="r1", config=RunConfig(), config_sha256="s", code_id="code-1", created_unix_s=1.0
        )
    )
    new.script = lambda _look: shown.model_copy(update={"manifest": there})
    (settled,) = execute_reconcile(operator, plan_reconcile(operator))
    known = desk.store.find_run("r1")
    assert known is not None
    assert (settled.way, [one.pod for one in known.members]) == ("start", ["c"])


def test_a_start_waits_for_every_pod_to_answer(desk: Desk) -> None:
    first, other = make_pods(desk, "a", "b")
    operator = operator_of(desk, [first, other])
    desk.store.leave_open("launch", "r1", pod="a", pods=["a", "b"], code_id="code-1")
    first.script = lambda _look: report("running")
    other.script = lambda _look: PodUnreachableError("b does not answer")
    (settled,) = execute_reconcile(operator, plan_reconcile(operator))
    assert (settled.way, settled.found) == ("wait", "pod `b`: b does not answer")


def test_a_start_does_not_wait_for_a_pod_that_was_forgotten(desk: Desk) -> None:
    (first,) = make_pods(desk, "a")
    operator = operator_of(desk, [first])
    desk.store.leave_open("launch", "r1", pod="a", pods=["a", "b"], code_id="code-1")
    first.script = lambda _look: report("planned")
    (settled,) = execute_reconcile(operator, plan_reconcile(operator))
    found = "attempt 1 is not on pod `b` yet; repeat it"
    assert (settled.way, settled.found) == ("rolled back", found)


@pytest.mark.parametrize(("rank", "kind"), [(0, HaltAction), (1, SignalAction)])
def test_a_pod_that_was_left_and_still_trains_is_stopped_as_its_rank_allows(
    desk: Desk, rank: int, kind: type[HaltAction | SignalAction]
) -> None:
    (left,) = make_pods(desk, "b")
    operator = operator_of(desk, [left])
    desk.store.leave_open("leave pod", "r1", pod="b", code_id="code-1", reason="it was silent")
    summary = report().manifest.model_copy(update={"node_rank": rank})
    left.script = lambda _look: report("running", manifest=summary)
    (settled,) = execute_reconcile(operator, plan_reconcile(operator))
    assert settled.way == "halt"
    assert len(left.asked_for(kind)) == len(left.actions) == 1
