"""An end that the loop does not see: which code and reason it leaves."""

import os

import pytest

from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.train.attempt import Attempt


class EndedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def end(run, manifest, monkeypatch):
    """Ends attempt 1 as the signal thread does; gives the exit code and the record."""

    def leave(code):
        raise EndedError(int(code))

    monkeypatch.setattr(os, "_exit", leave)

    def act():
        with pytest.raises(EndedError) as ended:
            Attempt(run, manifest)._exit_now("no clean stop within 24 s of SIGTERM")
        return ended.value.args[0], read_exit(run)

    return act


def ask(run, **fields):
    given = {"run_id": "r1", "attempt": 1, "reason": "stall: nothing has moved", "at": 0.0}
    write_halt(run, HaltRequest(**{**given, **fields}))


def test_a_loop_that_the_watchdog_ended_because_it_stood_still_has_hung(run, end):
    ask(run, by="watchdog", rule="stall")
    code, record = end()
    assert (code, record.code) == (16, 16)
    assert record.reason.startswith("hung (stall: nothing has moved); no clean stop")
    assert read_events(run)[-1].facts == {"code": 16}


@pytest.mark.parametrize(
    "fields",
    [
        {"by": "operator"},
        {"by": "watchdog", "rule": "loss_nonfinite"},
        {"by": "watchdog", "rule": "stall", "attempt": 2},
    ],
)
def test_any_other_forced_end_is_a_stop_that_can_be_resumed(run, end, fields):
    ask(run, **fields)
    code, record = end()
    assert (code, record.code) == (75, 75)
    assert "nothing was saved at the stop" in record.reason
