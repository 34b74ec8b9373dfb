"""How an attempt ended, whether the watchdog restarts it, and what holds in between."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.events import Event, read_events
from nsa_core.rundir.exit import ExitRecord
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import read_manifest
from nsa_core.rundir.process import identify
from nsa_ops.pod.act import act
from nsa_ops.pod.ending import (
    asked_to_stop,
    count_memory_kills,
    count_without_progress,
    decide_after,
    decide_restart,
    explain_code,
    foresee_restart,
    write_missing_exit,
)
from nsa_ops.pod.journal import Journal
from nsa_ops.pod.messages import HaltAction, NextAttemptAction, Reply
from nsa_ops.pod.probe import probe
from nsa_ops.pod.read_run import read_memory_fraction
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.pod.stacks import group_stacks
from tests.ops.pod.ends import exit_record, record_process, write_end


def event(kind: str, by: str = "watchdog", attempt: int = 1, **facts) -> Event:
    return Event(ts=1.0, iso="", attempt=attempt, kind=kind, by=by, message="m", facts=facts)


def decided(code, *, stop_asked: str = "", steps_done: int = 5, without_progress: int = 0):
    return decide_restart(
        exit_record(code),
        stop_asked=stop_asked,
        steps_done=steps_done,
        without_progress=without_progress,
        budget=3,
    ).restart


@pytest.mark.parametrize("code", [75, 1, -9, -11])
def test_a_preempted_or_crashed_run_is_restarted_within_its_budget(code: int) -> None:
    assert decided(code)
    assert decided(code, without_progress=2)
    assert not decided(code, without_progress=3)
    assert not decided(code, stop_asked="operator: enough")


@pytest.mark.parametrize("code", [0, 2, 10, 12, 13, 14, 15, 16, 93])
def test_an_end_on_purpose_is_never_restarted(code: int) -> None:
    assert not decided(code)


def test_a_crash_before_the_first_step_is_not_restarted_but_a_preemption_is() -> None:
    assert not decided(1, steps_done=0)
    assert decided(75, steps_done=0)


def test_restarts_count_as_without_progress_until_a_new_checkpoint_or_an_operator() -> None:
    restarts = [event("restarted", checkpoint_step=step) for step in (None, 100, 100)]
    assert count_without_progress(restarts, 100) == 2
    assert count_without_progress(restarts, 200) == 0
    assert count_without_progress([*restarts, event("resumed", by="operator")], 100) == 0
    assert count_without_progress([], None) == 0


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        (event("halt_asked", by="operator"), True),
        (event("signal", by="operator", signal="TERM"), True),
        (event("signal", by="watchdog", signal="KILL"), True),
        (event("signal", by="runner", signal="INT"), True),
        (event("signal", by="runner", signal="TERM"), False),
        (event("signal", by="operator", signal="USR1"), False),
        (event("signal", by="operator", signal="USR2"), False),
        (event("halt_asked", by="operator", attempt=2), False),
        (event("stale_halt", by="trainer"), False),
    ],
)
def test_who_asked_this_attempt_to_stop(asked, counts: bool) -> None:
    assert (asked_to_stop([event("started"), asked], 1) is not None) == counts


def test_a_kill_is_explained_by_who_asked_or_by_the_memory_of_the_pod(tmp_path: Path) -> None:
    asked = event("signal", by="operator", signal="KILL")
    assert "operator asked" in explain_code(-9, asked=asked, memory_kills=0)
    assert "memory limit" in explain_code(-9, asked=None, memory_kills=1)
    assert (
        explain_code(-9, asked=None, memory_kills=0)
        == "killed by SIGKILL: out of host memory, or by hand"
    )
    assert explain_code(-11, asked=None, memory_kills=0) == "killed by SIGSEGV"
    assert explain_code(-40, asked=None, memory_kills=0) == "killed by signal 40"
    assert "code 3" in explain_code(3, asked=None, memory_kills=0)
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 2\n")
    assert count_memory_kills((tmp_path / "absent", counter)) == 2
    assert count_memory_kills((tmp_path / "absent",)) == 0


def test_the_memory_in_use_is_the_containers_where_it_has_a_limit(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 250 kB\n")
    assert read_memory_fraction(info, tmp_path) == 0.75
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 300\nactive_file 100\n")
    assert read_memory_fraction(info, tmp_path) == 0.5
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory_fraction(info, tmp_path) == 0.75
    assert read_memory_fraction(tmp_path / "absent", tmp_path) is None


def test_the_odd_rank_of_a_hang_is_named_first() -> None:
    wait = "Thread 0x{} (most recent call first):\n  File all_reduce"
    stacks = {rank: wait.format(f"7f0{rank}") for rank in (0, 1, 3)} | {2: "  File loader"}
    assert [group.ranks for group in group_stacks(stacks)] == [[2], [0, 1, 3]]


AGAIN = {"changes": {"resume": "auto"}, "by": "watchdog"}


@pytest.fixture
def run(run):
    """A run of five steps that is being watched."""
    beat = Heartbeat(
        run_id="run-1", attempt=1, rank=0, pid=1, ts=1.0, iso="", msg="progress", phase="train",
        alive_seq=1, progress_seq=1, step=5,
    )  # fmt: skip
    append_line(run.heartbeat(), beat.model_dump_json())
    watch(run)
    return run


def watch(run, doing: str = "watching", attempt: int = 1) -> None:
    Journal(run).show(attempt, Verdict(level="healthy"), doing, "", restarts=0)


def end(run, code=-9) -> None:
    write_end(run, code, checkpoint_step=None, by="runner")


def test_the_record_of_the_trainer_counts_whatever_ended_its_process(run) -> None:
    end(run, 0)
    no_name = -40  # a real-time signal, which Python cannot name
    assert write_missing_exit(run, read_manifest(run), no_name).reason == "why"


def lose_processes(run) -> None:
    """The trainer and its runner were killed at once: nobody wrote exit.json."""
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(gone.pid)
    gone.communicate()
    record_process(run, identity)


def do(action: HaltAction | NextAttemptAction) -> Reply:
    return act(action.model_dump_json().encode())


def state(run):
    return probe(run.root.parent, ["run-1"], {}).runs[0].state


@pytest.mark.parametrize("code", [-9, 1, 75])
def test_a_run_that_the_watchdog_will_restart_is_not_over(run, code: int) -> None:
    end(run, code)
    assert state(run) == "resuming"
    assert "the watchdog is about to restart it" in foresee_restart(run, read_manifest(run))


def test_a_run_whose_processes_were_all_killed_is_not_lost_while_it_is_watched(run) -> None:
    lose_processes(run)
    assert state(run) == "resuming"
    run.watchdog.unlink()
    assert state(run) == "lost"


@pytest.mark.parametrize(("code", "over"), [(0, "finished"), (10, "halted"), (14, "failed")])
def test_an_end_that_is_never_restarted_is_final_at_once(run, code: int, over: str) -> None:
    end(run, code)
    assert state(run) == over


def test_a_watchdog_that_is_done_or_gone_restarts_nothing(run) -> None:
    end(run)
    watch(run, "done")
    assert state(run) == "failed"
    watch(run, "done", attempt=0)
    assert state(run) == "resuming"
    gone = run.watchdog.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194304')
    run.watchdog.write_text(gone)
    assert state(run) == "failed"


@pytest.mark.parametrize("lose", [end, lose_processes])
def test_a_halt_before_the_restart_keeps_the_run_ended(run, lose) -> None:
    lose(run)
    reply = do(HaltAction(run_dir=run.root, reason="enough"))
    assert (reply.code, reply.outcome) == (0, "done")
    assert [event.kind for event in read_events(run)] == ["halt_asked"]
    assert foresee_restart(run, read_manifest(run)) == ""
    assert state(run) != "resuming"
    assert do(HaltAction(run_dir=run.root, reason="again")).outcome == "already"


def test_a_halt_after_the_decision_and_before_the_restart_still_wins(run) -> None:
    end(run)
    record = ExitRecord.model_validate_json(run.exit.read_bytes())
    assert decide_after(run, read_manifest(run), record).restart
    do(HaltAction(run_dir=run.root, reason="enough"))
    reply = do(NextAttemptAction(run_dir=run.root, from_attempt=1, **AGAIN))
    assert (reply.outcome, reply.message) == ("refused", "it was asked to stop: operator: enough")
    assert read_manifest(run).attempt == 1
    assert do(NextAttemptAction(run_dir=run.root, from_attempt=1)).outcome == "done"


def test_a_halt_between_the_restart_and_its_runner_means_the_new_attempt(run) -> None:
    end(run)
    do(NextAttemptAction(run_dir=run.root, from_attempt=1, **AGAIN))
    assert state(run) == "resuming"
    reply = do(HaltAction(run_dir=run.root, reason="enough"))
    assert (reply.outcome, reply.attempt) == ("done", 2)


def test_an_attempt_that_an_operator_began_is_only_planned(run) -> None:
    end(run)
    do(NextAttemptAction(run_dir=run.root, from_attempt=1))
    assert state(run) == "planned"
