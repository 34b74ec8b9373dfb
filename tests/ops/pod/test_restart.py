import pytest

from nsa_core.rundir.events import Event
from nsa_core.rundir.exit import ExitRecord
from nsa_ops.pod.ending import (
    asked_to_stop,
    count_memory_kills,
    count_without_progress,
    decide_restart,
    explain_code,
)
from nsa_ops.pod.enforce import group_stacks
from nsa_ops.pod.read_run import read_memory_fraction


def event(kind, by="watchdog", attempt=1, **facts):
    return Event(ts=1.0, iso="", attempt=attempt, kind=kind, by=by, message="m", facts=facts)


def decided(code, *, stop_asked="", steps_done=5, without_progress=0):
    ended = ExitRecord(
        run_id="r", attempt=1, code=code, reason="why", step=5, checkpoint_step=None, at=1.0,
        by="trainer",
    )  # fmt: skip
    return decide_restart(
        ended,
        stop_asked=stop_asked,
        steps_done=steps_done,
        without_progress=without_progress,
        budget=3,
    ).restart


@pytest.mark.parametrize("code", [75, 1, -9, -11])
def test_a_preempted_or_crashed_run_is_restarted_within_its_budget(code):
    assert decided(code)
    assert decided(code, without_progress=2)
    assert not decided(code, without_progress=3)
    assert not decided(code, stop_asked="operator: enough")


@pytest.mark.parametrize("code", [0, 2, 10, 12, 13, 14, 15, 16, 93])
def test_an_end_on_purpose_is_never_restarted(code):
    assert not decided(code)


def test_a_crash_before_the_first_step_is_not_restarted_but_a_preemption_is():
    assert not decided(1, steps_done=0)
    assert decided(75, steps_done=0)


def test_restarts_count_as_without_progress_until_a_new_checkpoint_or_an_operator():
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
def test_who_asked_this_attempt_to_stop(asked, counts):
    assert (asked_to_stop([event("started"), asked], 1) is not None) == counts


def test_a_kill_is_explained_by_who_asked_or_by_the_memory_of_the_pod(tmp_path):
    asked = event("signal", by="operator", signal="KILL")
    assert "operator asked" in explain_code(-9, asked=asked, memory_kills=0)
    assert "memory limit" in explain_code(-9, asked=None, memory_kills=1)
    assert (
        explain_code(-9, asked=None, memory_kills=0)
        == "killed by SIGKILL: out of host memory, or by hand"
    )
    assert explain_code(-11, asked=None, memory_kills=0) == "killed by SIGSEGV"
    assert "code 3" in explain_code(3, asked=None, memory_kills=0)
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 2\n")
    assert count_memory_kills((tmp_path / "absent", counter)) == 2
    assert count_memory_kills((tmp_path / "absent",)) == 0


def test_the_memory_in_use_is_the_containers_where_it_has_a_limit(tmp_path):
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


def test_the_odd_rank_of_a_hang_is_named_first():
    wait = "Thread 0x{} (most recent call first):\n  File all_reduce"
    stacks = {rank: wait.format(f"7f0{rank}") for rank in (0, 1, 3)} | {2: "  File loader"}
    assert [group.ranks for group in group_stacks(stacks)] == [[2], [0, 1, 3]]
