import os
import signal
import subprocess
import sys
import time

import pytest

from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.rundir.manifest import write_manifest
from nsa_core.train.stop import (
    SignalWatch,
    StopAskedError,
    StopRequest,
    StopWatch,
    _request_from,
)
from tests.core.train.thread_ranks import run_both


@pytest.fixture
def stale():
    return []


@pytest.fixture
def watch(run, manifest, stale):
    return StopWatch(run, manifest, SignalWatch(lambda why: None), stale.append)


def halt(run, **fields):
    given = {"run_id": "r1", "attempt": 1, "reason": "enough", "by": "operator", "at": 0.0}
    write_halt(run, HaltRequest(**{**given, **fields}))


def test_without_a_request_nothing_stops(watch):
    assert watch.poll() is None
    watch.check()


def test_a_halt_of_this_attempt_stops(watch, run):
    halt(run)
    assert watch.poll().reason == "enough"
    with pytest.raises(StopAskedError):
        watch.check()


@pytest.mark.parametrize("fields", [{"attempt": 2}, {"run_id": "other"}])
def test_a_halt_of_another_attempt_or_run_is_reported_once_and_ignored(watch, run, stale, fields):
    halt(run, **fields)
    assert watch.poll() is None
    assert watch.poll() is None
    assert len(stale) == 1


@pytest.mark.parametrize("ahead_s", [600, -600])
def test_a_plain_line_stops_whatever_the_clock_of_the_laptop_says(run, manifest, stale, ahead_s):
    """The manifest says when it was launched, by the laptop's clock."""
    launched = manifest.model_copy(update={"created_unix_s": time.time() + ahead_s})
    write_manifest(run, launched)
    run.halt.write_text("halt: gates collapsed\n")
    watch = StopWatch(run, launched, SignalWatch(lambda why: None), stale.append)
    assert watch.poll().reason == "gates collapsed"


def test_a_plain_line_from_before_the_attempt_is_ignored_until_it_is_written_again(
    run, manifest, stale
):
    run.halt.write_text("halt: last week\n")
    os.utime(run.halt, (1000, 1000))
    watch = StopWatch(run, manifest, SignalWatch(lambda why: None), stale.append)
    assert watch.poll() is None
    assert "last week" in stale[0]
    run.halt.write_text("halt: now\n")
    os.utime(run.halt, (900, 900))  # the clock of this machine was set back meanwhile
    assert watch.poll().reason == "now"


def test_a_folder_as_stop_file_is_reported_once_and_stops_nothing(watch, run, stale):
    run.halt.mkdir()
    assert (watch.poll(), watch.poll()) == (None, None)
    assert len(stale) == 1
    assert "cannot be read" in stale[0]


def test_a_stop_request_gives_the_reason_even_if_a_signal_followed_it(run, manifest, stale):
    signals = SignalWatch(lambda why: None)
    signals.stop_signal = "SIGTERM"
    watch = StopWatch(run, manifest, signals, stale.append)
    assert watch.poll().reason == "received SIGTERM"
    halt(run, by="watchdog", reason="stall: nothing moves")
    assert watch.poll().reason == "stall: nothing moves"


def test_a_new_halt_after_a_stale_one_is_seen(watch, run):
    halt(run, attempt=7)
    assert watch.poll() is None
    halt(run)
    assert watch.poll() is not None


SLEEPER = """
import ctypes, sys, time
from pathlib import Path
from nsa_core.rundir.layout import RunDir
from nsa_core.train.stop import SignalWatch
import os
def exit_now(why):
    print(why, flush=True)
    os._exit(75)
watch = SignalWatch(exit_now, deadline_s=float(sys.argv[2]), same_s=0.1)
watch.install(RunDir(Path(sys.argv[1])))
print("ready", flush=True)
ctypes.CDLL(None).pause()
while True:
    ctypes.CDLL(None).pause()
"""


@pytest.fixture
def blocked(run):
    """A process whose main thread waits in C and never comes back to Python for long."""
    children = []

    def start(deadline_s):
        child = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, str(run.root), str(deadline_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.integration
def test_a_second_term_ends_a_process_that_is_blocked_in_c(blocked):
    child = blocked(30)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=5) == 75
    assert "second" in child.stdout.read()


@pytest.mark.integration
def test_what_a_shutdown_sends_to_all_and_the_runner_forwards_is_one_request(blocked):
    child = blocked(0.5)
    for _ in range(3):
        child.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert child.wait(timeout=5) == 75
    assert "no clean stop" in child.stdout.read()


@pytest.mark.integration
def test_the_deadline_ends_a_process_that_does_not_stop(blocked):
    child = blocked(0.3)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=5) == 75
    assert "no clean stop" in child.stdout.read()


@pytest.mark.integration
def test_usr1_dumps_all_stacks_while_the_process_is_blocked_in_c(blocked, run):
    child = blocked(30)
    child.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while "Thread" not in run.stack_dump().read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (
        "signal-watch" in run.stack_dump().read_text() or "Thread" in run.stack_dump().read_text()
    )
    assert child.poll() is None


@pytest.mark.integration
def test_usr2_does_not_end_a_process(blocked):
    child = blocked(30)
    child.send_signal(signal.SIGUSR2)
    time.sleep(0.2)
    assert child.poll() is None


@pytest.mark.parametrize("by_file", [False, True])
def test_what_one_rank_is_asked_all_do_at_the_same_place(run, manifest, by_file):
    """USR2 and TERM came to rank 1 alone, and the file is read by rank 0 alone."""

    def act(group):
        asked = SignalWatch(lambda why: None)
        is_asked = group.place.rank == 1
        stop = StopWatch(run, manifest, asked, pytest.fail, group)
        stop.check()
        assert not stop.take_save_request()
        asked.save_asked = is_asked
        stop.check()
        assert stop.take_save_request()
        assert not stop.take_save_request()
        if by_file and group.is_first:
            halt(run)
        if is_asked:
            asked.stop_signal = "SIGTERM"
        try:
            stop.check()
        except StopAskedError as stopped:
            asked = stopped.request
            return asked.halt is not None, asked.reason, group.has_agreed
        return "went on"

    expected = (True, "enough") if by_file else (False, "received SIGTERM")
    assert run_both(act) == [(*expected, True)] * 2


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_halt_says_whether_to_save_also_after_it_went_to_the_other_ranks(is_saved):
    asked = HaltRequest(
        run_id="r1", attempt=1, reason="enough", by="operator", at=0.0, save_checkpoint=is_saved
    )
    request = _request_from(StopRequest("enough", asked).to_bytes())
    assert request.save_checkpoint is is_saved
