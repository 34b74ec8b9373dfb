"""An attempt is started once, whoever else starts or moves the run at the same moment."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.configure import RunChoice
from nsa_ops.context import RunHandle
from nsa_ops.errors import OpsError, PodUnreachableError, StateConflictError, VerificationError
from nsa_ops.fleet.launch import FleetMember
from nsa_ops.fleet.resume import FleetResumePlan, execute_fleet_resume
from nsa_ops.fleet.source import Source
from nsa_ops.remote.transport import Completed
from nsa_ops.runs.choose import FoundRun
from nsa_ops.runs.launch import LaunchRequest, execute_launch, plan_launch
from nsa_ops.runs.lease import OldPod, Takeover, lease_held
from nsa_ops.runs.reconcile import execute_reconcile, plan_reconcile
from nsa_ops.runs.resume import ResumePlan, execute_resume
from nsa_ops.runs.windows import start_session, start_watchdog
from nsa_ops.store import PodRecord
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, answer, report
from tests.ops.runs.test_preflight_and_launch import pod, reply

__all__ = ["pod"]


MANIFEST = RunManifest(
    run_id="r1", config=RunConfig(), config_sha256="s", code_id="c", created_unix_s=1.0
)


def resume(desk: Desk) -> object:
    found = FoundRun(RUN, desk.operator.link(POD), report("halted"))
    planned = ResumePlan(found, MANIFEST, MANIFEST, None, [], [], "a.trainer")
    return execute_resume(desk.operator, planned)


def move(desk: Desk) -> object:
    left = Takeover(RUN, OldPod(RUN.pod, report("halted"), is_gone=False))
    member = FleetMember(RunHandle(desk.operator.link(POD), "c", "r1"), MANIFEST)
    source = Source(MANIFEST, 1, module="a.trainer")
    planned = FleetResumePlan(RUN, source, (member,), (left,), {POD.name: None}, [])
    return execute_fleet_resume(desk.operator, planned)


@pytest.fixture
def launch(pod: Desk) -> Callable[[], object]:
    """A launch of `r1` that was planned while no other was known."""
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    planned = plan_launch(pod.operator, request)
    pod.store.add_pod(PodRecord("b", "pod-b", "local", "/b", "python3", "cpu", 0.0))
    return lambda: execute_launch(pod.operator, planned)


def test_a_launch_is_refused_where_the_run_was_started_elsewhere_since_its_plan(
    pod: Desk, launch: Callable[[], object]
) -> None:
    pod.store.save_run(replace(RUN, pod="b", pod_id="pod-b"))
    pod.transport.answers["nsa_ops.pod.probe"] = answer(report("running"))
    with pytest.raises(StateConflictError, match=r"on pod `b`.*Two trainers of one run"):
        launch()
    assert not any("nsa_ops.pod.act" in words for words in pod.transport.asked)


def test_a_launch_is_refused_while_another_command_starts_the_run(
    pod: Desk, launch: Callable[[], object]
) -> None:
    with (
        lease_held(pod.operator, "r1"),
        pytest.raises(StateConflictError, match="Another command is starting or moving"),
    ):
        launch()
    pod.transport.answers["nsa_ops.pod.act"] = PodUnreachableError("it does not answer")
    with pytest.raises(PodUnreachableError):  # given back, and no trace of it is in the way
        launch()


@pytest.mark.parametrize("execute", [resume, move])
def test_a_resume_is_refused_where_another_command_has_moved_the_run_since_its_plan(
    desk: Desk, execute: Callable[[Desk], object]
) -> None:
    desk.store.save_run(replace(RUN, pod="b", pod_id="pod-b", attempt=2))
    with pytest.raises(StateConflictError, match="attempt 2 on pod `b` since") as caught:
        execute(desk)
    assert "nsa-ops status r1" in caught.value.hint
    assert desk.transport.asked == []


@pytest.mark.parametrize("execute", [resume, move])
def test_a_resume_is_refused_while_another_command_starts_the_run(
    desk: Desk, execute: Callable[[Desk], object]
) -> None:
    desk.store.save_run(RUN)
    with (
        lease_held(desk.operator, "r1"),
        pytest.raises(StateConflictError, match="Another command is starting or moving"),
    ):
        execute(desk)
    assert desk.transport.asked == []


def test_a_reconcile_leaves_an_act_open_while_another_command_starts_its_run(pod: Desk) -> None:
    pod.store.save_run(RUN)
    pod.store.leave_open("launch", "r1", pod=RUN.pod, code_id="code-1")
    pod.transport.answers |= {
        "nsa_ops.pod.probe": answer(report("planned")),
        "nsa_ops.pod.act": completed(reply()),
    }
    planned = plan_reconcile(pod.operator)
    with lease_held(pod.operator, "r1"):
        (settled,) = execute_reconcile(pod.operator, planned)
    assert (settled.way, "Another command" in settled.found) == ("wait", True)
    assert not any("new-session" in words for words in pod.transport.asked)


def test_the_lease_of_one_run_is_not_that_of_another(desk: Desk) -> None:
    with lease_held(desk.operator, "r1"), lease_held(desk.operator, "r2"):
        pass
    (desk.store.path.parent / "leases" / "r1.lock").unlink()
    (desk.store.path.parent / "leases" / "r1.lock").mkdir()
    with pytest.raises(OpsError, match="cannot be made") as caught, lease_held(desk.operator, "r1"):
        pass
    assert caught.value.exit_code == 11


DUPLICATE = completed(exit_code=1, stderr="duplicate session: nsa-r1")


def windows(desk: Desk, *lists: str) -> None:
    """What tmux lists, one answer a look; the last one for ever."""
    answers = list(lists)
    desk.transport.answers["list-panes"] = lambda _words, _stdin: completed(
        answers.pop(0) if len(answers) > 1 else answers[0]
    )


def started(desk: Desk) -> list[str]:
    verbs = ("new-session", "new-window")
    return [verb for words in desk.transport.asked for verb in verbs if verb in words]


def test_a_session_that_somebody_made_meanwhile_is_listed_again_and_completed(desk: Desk) -> None:
    windows(desk, "", "nsa-r1|train|7|0|/pod/runs/r1\n")
    desk.transport.answers |= {"new-session": DUPLICATE, "new-window": completed()}
    start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert started(desk) == ["new-session", "new-window"]


def test_a_session_that_is_refused_and_never_listed_is_an_error(desk: Desk) -> None:
    windows(desk, "")
    desk.transport.answers["new-session"] = DUPLICATE
    with pytest.raises(StateConflictError, match="did not start `r1`: duplicate session"):
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))


TRAINS = "nsa-r1|train|7|0|/pod/runs/r1\n"
WATCHES = "nsa-r1|watchdog|8|0|/pod/runs/r1\n"
#: What tmux says where the last session, and the server with it, ends between a look and a start.
GONE = [
    "no server running on /tmp/tmux-0/nsa",
    "error connecting to /tmp/tmux-0/nsa (No such file or directory)",
    "server exited unexpectedly",
    "lost server",
    "no current target",
    "can't find session: nsa-r1",
]


def once_refused(stderr: str) -> Callable[[Sequence[str], bytes], Completed]:
    """The first answer is a refusal, every later one is none."""
    answers = [completed(exit_code=1, stderr=stderr)]
    return lambda _words, _stdin: answers.pop() if answers else completed()


@pytest.mark.parametrize("gone", GONE)
def test_a_session_whose_last_window_just_ended_is_made_anew(desk: Desk, gone: str) -> None:
    """The watchdog of the attempt before leaves while the next attempt is started."""
    windows(desk, WATCHES, "")
    desk.transport.answers |= {"new-window": once_refused(gone), "new-session": completed()}
    start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert started(desk) == ["new-window", "new-session", "new-window"]


@pytest.mark.parametrize("gone", GONE)
def test_a_watchdog_alone_is_started_in_a_session_that_just_went(desk: Desk, gone: str) -> None:
    windows(desk, TRAINS, "")
    desk.transport.answers |= {"new-window": once_refused(gone), "new-session": completed()}
    start_watchdog(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert started(desk) == ["new-window", "new-session"]


def test_a_server_that_ends_as_a_session_is_made_is_tried_again(desk: Desk) -> None:
    windows(desk, "")
    desk.transport.answers |= {
        "new-session": once_refused("server exited unexpectedly"),
        "new-window": completed(),
    }
    start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert started(desk) == ["new-session", "new-session", "new-window"]


def test_a_watchdog_of_the_attempt_before_does_not_stand_for_the_new_one(desk: Desk) -> None:
    """It may be about to leave, and the run would train unwatched."""
    windows(desk, WATCHES)
    desk.transport.answers["new-window"] = completed()
    start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    made = [words for words in desk.transport.asked if "new-window" in words]
    assert [words[words.index("-n") + 1] for words in made] == ["train", "watchdog"]


def test_another_refusal_of_tmux_is_an_error_at_once(desk: Desk) -> None:
    windows(desk, "")
    desk.transport.answers["new-session"] = completed(exit_code=1, stderr="fork failed: no pids")
    with pytest.raises(StateConflictError, match="did not start `r1`: fork failed: no pids"):
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert started(desk) == ["new-session"]


def test_a_session_of_another_directory_is_not_taken_for_this_run(desk: Desk) -> None:
    windows(desk, "nsa-r1|train|7|0|/other/runs/r1\nnsa-r1|watchdog|8|0|/other/runs/r1\n")
    with pytest.raises(StateConflictError, match="session `nsa-r1` of `/other/runs/r1`") as no:
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert "kill-session -t =nsa-r1" in no.value.hint
    assert started(desk) == []


def test_a_runner_that_ends_at_once_is_reported_with_the_end_of_its_log(desk: Desk) -> None:
    """Its window was the only one of the session, which is gone before the watchdog gets one."""
    windows(desk, "")
    desk.transport.answers |= {
        "new-session": completed(),
        "new-window": completed(exit_code=1, stderr="can't find session: nsa-r1"),
        "tail": completed("Traceback\nImportError: libpython3.11.so.1.0: cannot open\n\n"),
    }
    with pytest.raises(VerificationError, match=r"ended as soon as .*libpython3.11.so") as ended:
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert POD.python in ended.value.hint
