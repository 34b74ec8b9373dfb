"""An attempt has ended and the watchdog, which is this process, has not looked yet."""

import os
import subprocess
import sys

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest, write_manifest
from nsa_core.rundir.process import identify
from nsa_ops.pod.act import act
from nsa_ops.pod.ending import decide_after, foresee_restart
from nsa_ops.pod.journal import Journal
from nsa_ops.pod.messages import HaltAction, NextAttemptAction
from nsa_ops.pod.probe import probe
from nsa_ops.pod.processes import RunProcesses, write_processes
from nsa_ops.pod.rules.verdict import Verdict

AGAIN = {"changes": {"resume": "auto"}, "by": "watchdog"}


@pytest.fixture
def run(tmp_path):
    """A run of five steps that is being watched."""
    run = RunDir(tmp_path / "run-1")
    run.root.mkdir()
    manifest = RunManifest(
        run_id="run-1", config=RunConfig(), config_sha256="0" * 64, created_unix_s=1.0
    )
    write_manifest(run, manifest)
    beat = Heartbeat(
        run_id="run-1", attempt=1, rank=0, pid=1, ts=1.0, iso="", msg="progress", phase="train",
        alive_seq=1, progress_seq=1, step=5,
    )  # fmt: skip
    append_line(run.heartbeat(), beat.model_dump_json())
    watch(run)
    return run


def watch(run, doing="watching", attempt=1):
    Journal(run).show(attempt, Verdict(level="healthy"), doing, "", restarts=0)


def end(run, code=-9):
    record = ExitRecord(
        run_id="run-1", attempt=1, code=code, reason="why", step=5, checkpoint_step=None, at=2.0,
        by="runner",
    )  # fmt: skip
    write_exit(run, record)


def lose_processes(run):
    """The trainer and its runner were killed at once: nobody wrote exit.json."""
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(gone.pid)
    gone.communicate()
    record = RunProcesses(
        run_id="run-1", attempt=1, runner=identity, trainer=identity, started_unix_s=1.0
    )
    write_processes(run, record)


def do(action):
    return act(action.model_dump_json().encode())


def state(run):
    return probe(run.root.parent, ["run-1"], {}).runs[0].state


@pytest.mark.parametrize("code", [-9, 1, 75])
def test_a_run_that_the_watchdog_will_restart_is_not_over(run, code):
    end(run, code)
    assert state(run) == "resuming"
    assert "the watchdog is about to restart it" in foresee_restart(run, read_manifest(run))


def test_a_run_whose_processes_were_all_killed_is_not_lost_while_it_is_watched(run):
    lose_processes(run)
    assert state(run) == "resuming"
    run.watchdog.unlink()
    assert state(run) == "lost"


@pytest.mark.parametrize(("code", "over"), [(0, "finished"), (10, "halted"), (14, "failed")])
def test_an_end_that_is_never_restarted_is_final_at_once(run, code, over):
    end(run, code)
    assert state(run) == over


def test_a_watchdog_that_is_done_or_gone_restarts_nothing(run):
    end(run)
    watch(run, "done")
    assert state(run) == "failed"
    watch(run, "done", attempt=0)
    assert state(run) == "resuming"
    gone = run.watchdog.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194304')
    run.watchdog.write_text(gone)
    assert state(run) == "failed"


@pytest.mark.parametrize("lose", [end, lose_processes])
def test_a_halt_before_the_restart_keeps_the_run_ended(run, lose):
    lose(run)
    reply = do(HaltAction(run_dir=run.root, reason="enough"))
    assert (reply.code, reply.outcome) == (0, "done")
    assert [event.kind for event in read_events(run)] == ["halt_asked"]
    assert foresee_restart(run, read_manifest(run)) == ""
    assert state(run) != "resuming"
    assert do(HaltAction(run_dir=run.root, reason="again")).outcome == "already"


def test_a_halt_after_the_decision_and_before_the_restart_still_wins(run):
    end(run)
    record = ExitRecord.model_validate_json(run.exit.read_bytes())
    assert decide_after(run, read_manifest(run), record).restart
    do(HaltAction(run_dir=run.root, reason="enough"))
    reply = do(NextAttemptAction(run_dir=run.root, from_attempt=1, **AGAIN))
    assert (reply.outcome, reply.message) == ("refused", "it was asked to stop: operator: enough")
    assert read_manifest(run).attempt == 1
    assert do(NextAttemptAction(run_dir=run.root, from_attempt=1)).outcome == "done"


def test_a_halt_between_the_restart_and_its_runner_means_the_new_attempt(run):
    end(run)
    do(NextAttemptAction(run_dir=run.root, from_attempt=1, **AGAIN))
    assert state(run) == "resuming"
    reply = do(HaltAction(run_dir=run.root, reason="enough"))
    assert (reply.outcome, reply.attempt) == ("done", 2)


def test_an_attempt_that_an_operator_began_is_only_planned(run):
    end(run)
    do(NextAttemptAction(run_dir=run.root, from_attempt=1))
    assert state(run) == "planned"
