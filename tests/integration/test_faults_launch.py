"""Faults of launch and watch on a pod behind a real sshd: whatever is cut, one run starts."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.configure import RunChoice
from nsa_ops.context import Operator, connect_audited
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import read_processes
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed, Transport
from nsa_ops.runs.launch import Launched, LaunchRequest, execute_launch, plan_launch
from nsa_ops.settings import Settings
from nsa_ops.store import PodRecord
from tests.integration.local_pod import STEADY
from tests.integration.pod_runs import wait_for
from tests.integration.ssh_pod import SshPod

pytestmark = pytest.mark.integration
LONG = "schedule.steps=4000"


def trainers_of(pod: SshPod, run_id: str) -> set[int]:
    """Every process that ever trained the run."""
    beats = read_records(pod.run_dir(run_id).heartbeat(), Heartbeat).records
    return {beat.pid for beat in beats}


class StoppedOnce:
    """A door through which Ctrl-C comes once right after each call has done its work."""

    def __init__(self, inner: Transport, stopped: list[str]) -> None:
        self._inner = inner
        self._stopped = stopped
        self.where = inner.where

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        done = self._inner.run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
        call = " ".join(argv)
        if call not in self._stopped:
            self._stopped.append(call)
            raise KeyboardInterrupt
        return done

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        return self._inner.tail(path, offset, max_bytes=max_bytes, timeout_s=timeout_s)


def launch(operator: Operator, run_id: str) -> Launched:
    request = LaunchRequest(
        choice=RunChoice(sets=(LONG,)), run_id=run_id, trainer_module=STEADY,
        overrides={"preflight": "a test"},
    )  # fmt: skip
    return execute_launch(operator, plan_launch(operator, request))


@pytest.mark.slow
def test_ctrl_c_after_any_call_of_a_launch_leaves_what_the_next_one_completes(pod: SshPod) -> None:
    pod.lose_code()
    stopped: list[str] = []

    def connect(record: PodRecord, settings: Settings) -> Transport:
        return StoppedOnce(connect_audited(record, settings), stopped)

    launched = None
    while launched is None:
        operator = pod.operator(connect)
        try:
            launched = launch(operator, "r1")
        except KeyboardInterrupt:
            assert len(stopped) < 40
        finally:
            operator.store.close()
    for step in ("CODE_ID", "tarfile", "pod.act", "pod.probe", "new-session", "new-window"):
        assert any(step in one for one in stopped), (step, stopped)
    wait_for(lambda: trainers_of(pod, "r1"))
    wait_for(lambda: read_watchdog(pod.run_dir("r1")))
    status = pod.must("status", "--json").data["report"]
    assert (status["state"], status["flags"]) == ("running", [])
    assert status["watchdog_alive"] is True
    assert len(trainers_of(pod, "r1")) == 1
    assert status["manifest"]["attempt"] == 1


def test_ctrl_c_at_the_terminal_ends_a_launch_and_not_the_run(pod: SshPod) -> None:
    launching = pod.start(
        "launch", "--run-id", "r1", "--trainer", STEADY, "--override", "preflight=a test",
        "--set", LONG,
    )  # fmt: skip
    wait_for(lambda: read_processes(pod.run_dir("r1")), 60)
    launching.send_signal(signal.SIGINT)
    _, err = launching.communicate(timeout=30)
    assert (launching.returncode, b"Stopped by Ctrl-C" in err) == (130, True), err
    again = pod.launch("r1", LONG)
    assert (again.exit_code, again.data["is_new"]) == (0, False)
    wait_for(lambda: trainers_of(pod, "r1"))
    assert len(trainers_of(pod, "r1")) == 1


def test_a_link_lost_after_the_start_and_before_its_answer_starts_no_second_run(
    pod: SshPod,
) -> None:
    launching = pod.start(
        "launch", "--run-id", "r1", "--trainer", STEADY, "--override", "preflight=a test",
        "--set", LONG,
    )  # fmt: skip
    wait_for(pod.run_dir("r1").manifest.exists, 60)
    pod.proxy.delay_s = 0.5  # the answer is on its way for longer than the start takes to be seen
    wait_for(lambda: "nsa-r1" in pod.tmux("list-sessions"), 60)
    pod.proxy.is_refusing = True
    pod.proxy.cut()
    _, err = launching.communicate(timeout=60)
    assert launching.returncode == 5, err
    pod.proxy.is_refusing, pod.proxy.delay_s = False, 0.0
    again = pod.launch("r1", LONG)
    assert again.exit_code == 0, again
    wait_for(lambda: trainers_of(pod, "r1"))
    wait_for(lambda: pod.must("status", "--json").data["report"]["watchdog_alive"])
    assert pod.must("status", "--json").data["report"]["state"] == "running"
    assert len(trainers_of(pod, "r1")) == 1


def test_two_operators_who_launch_one_run_at_once_start_it_once(pod: SshPod) -> None:
    other = replace(pod, state="other")
    other.add()
    words = (
        "launch", "--run-id", "r1", "--trainer", STEADY, "--override", "preflight=a test",
        "--set", LONG, "--json",
    )  # fmt: skip
    both = [pod.start(*words), other.start(*words)]
    answers = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert trainers_of(pod, "r1").__len__() == 1
    for each in (pod, other):
        assert each("status", "--exit-code").exit_code == 21

    def windows() -> list[str]:
        return sorted(pod.tmux("list-windows", "-t", "nsa-r1", "-F", "#{window_name}").split())

    # Each may have started a watchdog; the one without the lock waits for it, and then it ends.
    wait_for(lambda: windows() == ["train", "watchdog"])
    other("pod", "rm", "here", "-y")


def test_a_watchdog_that_was_killed_is_started_again_by_the_same_launch(pod: SshPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    record = wait_for(lambda: read_watchdog(pod.run_dir("r1")))
    for pid in (record.identity.pid, read_processes(pod.run_dir("r1")).runner.pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pod.must("status", "--json").data["report"]["flags"] == ["unwatched"])
    again = pod.launch("r1", LONG)
    assert (again.exit_code, again.data["is_new"]) == (0, False)
    assert "its watchdog was gone and is started again" in again.err
    wait_for(lambda: pod.must("status", "--json").data["report"]["flags"] == [])
    assert len(trainers_of(pod, "r1")) == 1


@pytest.mark.slow
def test_watch_goes_through_an_outage_of_30_seconds_without_losing_or_repeating_a_line(
    pod: SshPod,
) -> None:
    """First nothing passes and nobody is told, then connections are refused, then all is well."""
    assert pod.launch("r1", "schedule.steps=700").exit_code == 0
    watching = pod.start("watch", "--json", "--from-start")
    assert watching.stdout is not None
    first = watching.stdout.readline()
    pod.proxy.is_stalled = True
    time.sleep(15)
    pod.proxy.is_stalled, pod.proxy.is_refusing = False, True
    pod.proxy.cut()
    time.sleep(15)
    pod.proxy.is_refusing = False
    out, err = watching.communicate(timeout=90)
    assert watching.returncode == 0, err
    assert b"trying again; the run is not affected" in err
    frames = [json.loads(line) for line in (first + out).splitlines()]
    seen = [beat["alive_seq"] for frame in frames for beat in frame["data"]["beats"]]
    written = read_records(pod.run_dir("r1").heartbeat(), Heartbeat).records
    assert seen == [beat.alive_seq for beat in written]


def test_a_command_that_is_stopped_and_continued_loses_and_repeats_nothing(pod: SshPod) -> None:
    assert pod.launch("r1", "schedule.steps=160").exit_code == 0
    following = pod.start("logs", "-f", "--raw")
    assert following.stdout is not None
    first = os.read(following.stdout.fileno(), 20)
    following.send_signal(signal.SIGSTOP)
    time.sleep(3)
    following.send_signal(signal.SIGCONT)
    out, err = following.communicate(timeout=60)
    assert following.returncode == 0, err
    assert first + out == pod.run_dir("r1").log.read_bytes()
