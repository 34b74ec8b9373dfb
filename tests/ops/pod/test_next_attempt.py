"""A kill at any moment while the next attempt is begun: what is there, and what a second call does.

The fault stops this process where the kernel is asked to change the run directory, and keeps
stopping it, so that no clean-up runs that a kill would not let run.
"""

import os
import time

import pytest

from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    begin_next_attempt,
    read_manifest,
    write_manifest,
)
from nsa_core.rundir.process import ProcessIdentity, boot_id
from nsa_ops.pod.act import act
from nsa_ops.pod.messages import NextAttemptAction, Reply
from nsa_ops.pod.probe import report_run
from tests.ops.pod.ends import record_process, write_end

CHANGES = ("mkdir", "replace", "unlink", "fsync")
#: Three files are replaced, each with an fsync of itself and of its folder; two folders are made
#: in three tries, one file is removed and its folder synced.
NUM_CHANGES = 14


class KilledError(BaseException):
    """Nothing catches it on its way, as nothing catches a kill."""


@pytest.fixture
def run(run):
    """Attempt 1 was halted; its processes are gone."""
    gone = ProcessIdentity(pid=2**22, start_ticks=1, boot_id=boot_id())
    record_process(run, gone)
    write_end(run)
    assert state(run) == "halted"
    return run


def state(run):
    return report_run(run, None, time.time()).state


def begin_until_killed(run, num_changes) -> bool:
    """Begin the next attempt; die before one more change. Whether it died."""
    left = num_changes

    def watch(original):
        def change(*given, **named):
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return original(*given, **named)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, watch(getattr(os, name)))
        try:
            begin_next_attempt(run, at_unix_s=3.0)
        except KilledError:
            return True
    return False


def ask(run) -> Reply:
    asked = NextAttemptAction(run_dir=run.root, from_attempt=1, changes={"resume": "auto"})
    return act(asked.model_dump_json().encode())


@pytest.mark.parametrize("num_changes", range(NUM_CHANGES))
def test_after_a_kill_the_run_is_not_lost_and_a_second_call_succeeds(run, num_changes: int) -> None:
    assert begin_until_killed(run, num_changes)
    begun = read_manifest(run).attempt == 2
    assert state(run) == ("planned" if begun else "halted")
    assert ask(run).outcome == ("already" if begun else "done")
    assert (read_manifest(run).attempt, read_exit(run)) == (2, None)
    assert read_exit(RunDir(run.attempt(1))).code == 10


def test_the_kills_cover_every_change(run) -> None:
    assert not begin_until_killed(run, NUM_CHANGES)


def test_a_record_that_a_kill_left_behind_is_kept_for_its_own_attempt_only(run) -> None:
    assert begin_until_killed(run, NUM_CHANGES - 2)
    assert run.exit.exists()
    assert begin_next_attempt(run, at_unix_s=4.0).attempt == 3
    assert not run.exit.exists()
    assert read_exit(RunDir(run.attempt(1))).code == 10
    assert not RunDir(run.attempt(2)).exit.exists()


def test_the_end_of_the_next_attempt_replaces_a_record_that_a_kill_left_behind(run) -> None:
    assert begin_until_killed(run, NUM_CHANGES - 2)
    write_end(run, 0, attempt=2)
    assert (read_exit(run).attempt, state(run)) == (2, "finished")


@pytest.mark.parametrize("by", ["operator", "watchdog"])
def test_each_new_attempt_has_an_identity_and_the_chain_of_the_earlier_ones(run, by: str) -> None:
    first = read_manifest(run).model_copy(update={"attempt_id": "a" * 32})
    write_manifest(run, first)
    asked = NextAttemptAction(run_dir=run.root, from_attempt=1, by=by)
    begun = act(asked.model_dump_json().encode()).manifest
    assert len(begun.attempt_id) == 32
    assert begun.earlier_attempts == {1: "a" * 32}


@pytest.mark.parametrize("field", ["attempt_id", "earlier_attempts"])
def test_the_identity_of_an_attempt_cannot_be_chosen(run, field: str) -> None:
    changes = {field: "b" * 32 if field == "attempt_id" else {}}
    asked = NextAttemptAction(run_dir=run.root, from_attempt=1, changes=changes)
    reply = act(asked.model_dump_json().encode())
    assert (reply.code, field in reply.message) == (2, True)
    assert read_manifest(run).attempt == 1
