from dataclasses import replace

import pytest

from nsa_core.config.recipe import resolve
from nsa_core.rundir.exit import ExitRecord
from nsa_core.rundir.halt import HaltRequest
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.status import Evidence, derive_status

RESOLVED = resolve("tiny-cpu", "cpu")
MANIFEST = RunManifest(
    run_id="run-a", config=RESOLVED.config, config_sha256=RESOLVED.sha256, created_unix_s=0.0
)
GOING = Evidence(
    now_unix_s=100.0,
    manifest=MANIFEST,
    trainer_alive=True,
    runner_alive=True,
    watchdog_alive=True,
)


def beat(phase="train", ts=95.0):
    return Heartbeat(
        run_id="run-a",
        attempt=1,
        rank=0,
        pid=1,
        ts=ts,
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
        (replace(GOING, last_beat=beat()), "running"),
        (replace(GOING, last_beat=beat("data")), "staging"),
        (replace(GOING, last_beat=beat("compile")), "starting"),
        (GOING, "starting"),
        (replace(GOING, manifest=MANIFEST.model_copy(update={"attempt": 2})), "resuming"),
        (replace(GOING, last_beat=beat(), halt=HALT), "halting"),
        (replace(GOING, last_beat=beat(), runner_alive=False), "running"),
        (replace(GOING, exit=ended(0)), "finished"),
        (replace(GOING, exit=ended(10)), "halted"),
        (replace(GOING, exit=ended(75)), "halted"),
        (replace(GOING, exit=ended(12)), "failed"),
        (replace(GOING, exit=ended(-9)), "failed"),
        (replace(GOING, exit=ended(-9), restart="crashed"), "resuming"),
        (replace(GOING, trainer_alive=False, runner_alive=False), "lost"),
        (replace(GOING, trainer_alive=False, runner_alive=False, same_boot=False), "preempted"),
        (replace(GOING, trainer_alive=None, runner_alive=None), "planned"),
    ],
)
def test_each_state_follows_from_its_evidence(evidence, state):
    assert derive_status(evidence).state == state


def test_an_old_heartbeat_and_a_missing_watchdog_are_flags_and_not_states():
    status = derive_status(replace(GOING, last_beat=beat(ts=10.0), watchdog_alive=False))
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
def test_who_starts_a_dead_watchdog_again_is_told(watchdog, runner, says):
    going = replace(GOING, last_beat=beat(), watchdog_alive=watchdog, runner_alive=runner)
    assert derive_status(going).why.partition("step 7")[2].endswith(says)
    assert ("dead" in derive_status(going).why) == bool(says)


def test_a_run_that_crashed_after_it_was_asked_to_halt_says_both():
    found = derive_status(replace(GOING, exit=ended(1), halt=HALT))
    assert found.state == "failed"
    assert found.why.endswith("because; operator had asked it to halt (enough)")


def test_a_heartbeat_of_a_clock_that_is_ahead_is_not_of_the_future():
    found = derive_status(replace(GOING, last_beat=beat(ts=100.2)))
    assert found.why.startswith("heartbeat 0 s ago")
