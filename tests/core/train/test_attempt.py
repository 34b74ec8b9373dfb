"""Ends outside the loop: a forced end, and a disk that takes no byte at the start."""

import errno
import os
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.train import attempt, checkpoint_files
from nsa_core.train.attempt import TrainerAttempt
from nsa_core.train.failure import DiskFullError


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
            TrainerAttempt(run, manifest)._exit_now("no clean stop within 24 s of SIGTERM")
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


SAYS = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "right to write",
    errno.EIO: "the disk fails",
    errno.ENODEV: "Look at that path",
}


@pytest.mark.parametrize("number", SAYS)
def test_the_hint_at_the_start_fits_the_error_of_the_disk(run, manifest, monkeypatch, number):
    def refuse(_run):
        raise OSError(number, os.strerror(number), str(run.reserve))

    monkeypatch.setattr(attempt, "hold_reserve", refuse)
    signals = SimpleNamespace(install=lambda *_: None)
    with pytest.raises(DiskFullError) as refused:
        attempt.TrainerAttempt(run, manifest)._train(signals)
    assert SAYS[number] in refused.value.hint
    assert ("Free space" in refused.value.hint) == (number in {errno.ENOSPC, errno.EDQUOT})
    assert os.strerror(number) in str(refused.value)


def test_safetensors_hides_the_number_in_its_words():
    full = SafetensorError("Error while serializing: I/O error: No space (os error 28)")
    other = SafetensorError("I/O error: Read-only file system (os error 30)")
    assert (checkpoint_files.is_disk_full(full), checkpoint_files.is_disk_full(other)) == (
        True,
        False,
    )
    assert "read-only" in checkpoint_files.advise(other)
