"""The runner starts a watchdog that has died; a watchdog says which signal has ended it."""

import os
import signal
import time

import pytest

from nsa_core.rundir.atomic import append_line, write_text
from nsa_core.rundir.events import read_events
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.process import ProcessIdentity, identify
from nsa_ops.pod.ending import read_stop
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.keep_watched import MAX_STARTS, WatchdogKeeper, start_watchdog
from nsa_ops.pod.messages import WatchdogRecord
from nsa_ops.pod.probe import probe
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.pod.watchdog import Watchdog
from tests.ops.pod.conftest import begin, begin_ranks
from tests.ops.pod.ends import record_process, write_end
from tests.ops.pod.health import beat

DEAD = ProcessIdentity(pid=2**22 - 1, start_ticks=1, boot_id="another boot")


def record(run, identity, doing: str = "watching") -> None:
    found = WatchdogRecord(
        run_id="run-1", attempt=1, identity=identity, verdict=Verdict(level="healthy"),
        doing=doing, ts=1.0,
    )  # fmt: skip
    write_text(run.watchdog, found.model_dump_json())


@pytest.fixture
def keeper(run: RunDir):
    """The keeper, and what it has started."""
    started = []
    return WatchdogKeeper(run, 1, "a.trainer", lambda *given: started.append(given)), started


def test_a_dead_watchdog_is_started_again_a_few_times_and_each_start_is_recorded(
    run: RunDir, keeper
) -> None:
    made, started = keeper
    record(run, DEAD)
    for _ in range(MAX_STARTS + 2):
        made.look()
    assert started == [(run, "a.trainer")] * MAX_STARTS
    told = [event for event in read_events(run) if event.kind == "watchdog_started"]
    assert [event.by for event in told] == ["runner"] * MAX_STARTS
    assert f"pid {DEAD.pid}, is dead: start 1 of {MAX_STARTS}" in told[0].message


def test_a_watchdog_that_lives_or_is_done_or_never_was_is_left_alone(run: RunDir, keeper) -> None:
    made, started = keeper
    made.look()
    record(run, identify(os.getpid()))
    made.look()
    record(run, DEAD, doing="done")
    made.look()
    assert started == []


def test_a_watchdog_that_was_done_with_the_attempt_before_is_followed_by_another(
    run: RunDir,
) -> None:
    """It judged the end of attempt 1 while attempt 2 was begun, and its window was still there."""
    record(run, DEAD, doing="done")
    started = []
    WatchdogKeeper(run, 2, "a.trainer", lambda *given: started.append(given)).look()
    assert started == [(run, "a.trainer")]


def test_what_is_started_is_the_watchdog_of_that_run(run: RunDir) -> None:
    """It finds an ended attempt, and nothing to watch."""
    write_end(run, 0)
    assert start_watchdog(run, "a.trainer").wait(60) == 0
    assert [event.kind for event in read_events(run)] == ["not_restarted"]


def look(run):
    return probe(run.root.parent, ["run-1"], {}).runs[0]


@pytest.mark.parametrize("code", [75, 10])
def test_an_end_together_with_the_watchdog_is_reported_as_the_end_of_all_processes(
    run: RunDir, code: int
) -> None:
    with pytest.raises(SystemExit):
        Watchdog(run).end_by_signal(signal.SIGTERM, None)
    write_end(run, code, at=time.time())
    assert ("at logout" in look(run).why) == (code == 75)
    write_end(run, code, at=time.time() - 3600)
    assert "at logout" not in look(run).why
    assert read_stop(run, RunManifest.model_validate_json(run.manifest.read_bytes())) == ""


def test_the_rate_of_a_run_survives_its_watchdog_and_a_resume(run: RunDir) -> None:
    for step in range(1, 30):
        append_line(run.heartbeat(), beat(step, tokens_per_s=1000.0).model_dump_json())
    first = Watchdog(run)
    first._look()
    assert read_watchdog(run).best_tokens_per_s == 1000.0

    run.heartbeat().unlink()  # as if it were longer than what is read of the past
    begin(run, attempt=2)
    first._look()
    second = Watchdog(run)
    assert (first._tracker.best_rate, second._tracker.best_rate) == (1000.0, 1000.0)


def watched_ranks(run: RunDir, **second) -> list[tuple[str, str]]:
    """What the watchdog of a run with two ranks notes at its first looks; `second` is of rank 1."""
    begin_ranks(run, 2)
    me = identify(os.getpid())
    record_process(run, me)
    watchdog = Watchdog(run)
    for step in range(1, 9):  # after its start: it follows both files
        for rank, fields in ((0, {}), (1, {"loss": None, **second})):
            given = {"run_id": "run-1", "rank": rank, "work_s": 0.5, **fields}
            line = beat(step, **given)
            append_line(run.heartbeat(rank), line.model_dump_json())
        watchdog._look()
    return [(event.kind, event.message) for event in read_events(run)]


def test_the_watchdog_follows_every_rank_and_notes_a_straggler_once(run: RunDir) -> None:
    assert watched_ranks(run) == []
    run.heartbeat(1).unlink()
    run.heartbeat().unlink()
    ((kind, message),) = watched_ranks(run, work_s=1.0)
    assert kind == "warning"
    assert message.startswith("Rank 1 takes 2.00 times as long for a step as the median of the")


def test_a_file_that_is_no_ranks_own_is_noted_once_and_not_judged(run: RunDir) -> None:
    ((kind, message),) = watched_ranks(run, rank=0, work_s=9.0)
    assert kind == "unreadable"
    assert "heartbeat_rank1.jsonl has 1 line that cannot be used as heartbeats of rank 1" in message
