import pytest

from nsa_core.rundir.exit import ExitRecord
from nsa_core.rundir.halt import HaltRequest
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.status import RunEvidence, derive_status

GOING = RunEvidence(trainer_alive=True, runner_alive=True, watchdog_alive=True, beat_age_s=5.0)


def going(**differs):
    return GOING.model_copy(update=differs)


def beat(phase="train"):
    return Heartbeat(
        run_id="run-a",
        attempt=1,
        rank=0,
        pid=1,
        ts=95.0,
        iso="",
        msg="beat",
        phase=phase,
        alive_seq=1,
        progress_seq=1,
        step=7,
    )


def ended(code):
    return ExitRecord(
        run_id="run-a",
        attempt=1,
        code=code,
        reason="because",
        step=7,
        checkpoint_step=None,
        at=1.0,
        by="trainer",
    )


HALT = HaltRequest(run_id="run-a", attempt=1, reason="enough", by="operator", at=1.0)


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        (going(last_beat=beat()), "running"),
        (going(last_beat=beat("data")), "staging"),
        (going(last_beat=beat("compile")), "starting"),
        (GOING, "starting"),
        (going(last_beat=beat(), halt=HALT), "halting"),
        (going(last_beat=beat(), runner_alive=False), "running"),
        (going(exit=ended(0)), "finished"),
        (going(exit=ended(10)), "halted"),
        (going(exit=ended(75)), "halted"),
        (going(exit=ended(12)), "failed"),
        (going(exit=ended(-9)), "failed"),
        (going(trainer_alive=False, runner_alive=False), "lost"),
        (going(trainer_alive=False, runner_alive=False, same_boot=False), "preempted"),
        (going(trainer_alive=None, runner_alive=None), "planned"),
    ],
)
def test_each_state_follows_from_its_evidence(evidence, state):
    assert derive_status(evidence, 1).state == state


def test_a_later_attempt_and_one_that_the_watchdog_restarts_are_resuming():
    assert derive_status(GOING, 2).state == "resuming"
    found = derive_status(going(exit=ended(-9)), 1, "crashed")
    assert (found.state, found.why) == ("resuming", "crashed")


def test_an_old_heartbeat_and_a_missing_watchdog_are_flags_and_not_states():
    status = derive_status(going(last_beat=beat(), beat_age_s=90.0, watchdog_alive=False), 1)
    assert status.state == "running"
    assert status.flags == ["unwatched", "stale"]


@pytest.mark.parametrize(
    ("watchdog", "runner", "says"),
    [
        (False, True, "its runner starts it again"),
        (False, False, "the same `launch --run-id` starts a watchdog"),
        (None, True, ""),
    ],
)
def test_the_status_says_who_restarts_a_dead_watchdog(watchdog, runner, says):
    seen = going(last_beat=beat(), watchdog_alive=watchdog, runner_alive=runner)
    why = derive_status(seen, 1).why
    assert why.partition("step 7")[2].endswith(says)
    assert ("dead" in why) == bool(says)


def test_a_run_that_crashed_after_it_was_asked_to_halt_says_both():
    found = derive_status(going(exit=ended(1), halt=HALT), 1)
    assert found.state == "failed"
    assert found.why.endswith("because; operator had asked it to halt (enough)")


def test_a_heartbeat_of_a_clock_that_is_ahead_is_not_of_the_future():
    found = derive_status(going(last_beat=beat(), beat_age_s=-0.2), 1)
    assert found.why.startswith("heartbeat 0 s ago")
