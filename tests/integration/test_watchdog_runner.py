import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.process import ProcessIdentity, identify, is_alive
from nsa_ops.pod.act import act
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.messages import HaltAction, SignalAction, WatchdogRecord
from nsa_ops.pod.processes import LockHeldError, read_processes, take_lock
from nsa_ops.pod.rules.verdict import Verdict
from tests.integration.pod_runs import FAKE, make_run, start, wait_for

pytestmark = pytest.mark.integration


def trainer_of(run) -> Any:
    return wait_for(lambda: (r := read_processes(run)) and r.trainer and r)


def kill(identity) -> None:
    if is_alive(identity):
        os.kill(identity.pid, signal.SIGKILL)


def test_the_runner_keeps_the_trainers_own_exit_record_and_code(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["beat", 3], ["exit_record", 12]])
    assert start("runner", run).wait(20) == 12
    assert (read_exit(run).code, read_exit(run).by) == (12, "trainer")
    assert [e.kind for e in read_events(run)] == ["started", "ended"]


def test_an_end_that_the_trainer_recorded_is_not_recorded_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["tell_end", "all steps done"], ["exit_record", 0]])
    assert start("runner", run).wait(20) == 0
    assert [(e.kind, e.by) for e in read_events(run)] == [
        ("started", "runner"),
        ("ended", "trainer"),
    ]


def test_a_trainer_that_is_killed_gets_its_exit_record_from_the_runner(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["say", "last words"], ["beat", 4], ["die", "SIGKILL"]])
    assert start("runner", run).wait(20) == 128 + 9
    record = read_exit(run)
    assert (record.code, record.by, record.step) == (-9, "runner", 4)
    assert "out of host memory" in record.reason
    assert "last words" in run.log.read_text()


def test_a_trainer_that_ends_with_zero_but_without_a_record_has_not_finished(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, [["exit", 0]])
    start("runner", run).wait(20)
    assert read_exit(run).code == 1


def test_the_trainer_is_started_with_the_environment_of_a_run(tmp_path: Path) -> None:
    names = ["OMP_WAIT_POLICY", "PYTHONUNBUFFERED", "PYTORCH_CUDA_ALLOC_CONF"]
    run = make_run(tmp_path, [["say_environment", names], ["exit_record", 0]])
    start("runner", run).wait(20)
    assert run.log.read_text().splitlines() == [
        "OMP_WAIT_POLICY=PASSIVE",
        "PYTHONUNBUFFERED=1",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ]


def test_of_launches_at_the_same_time_one_starts_a_trainer_and_the_others_refuse(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, [["sleep", 1.0], ["exit_record", 0]])
    codes = sorted(runner.wait(30) for runner in [start("runner", run) for _ in range(4)])
    assert codes == [0, 7, 7, 7]
    assert [e.kind for e in read_events(run)].count("started") == 1


def test_an_attempt_that_has_ended_is_not_started_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["exit_record", 0]])
    assert start("runner", run).wait(20) == 0
    assert start("runner", run).wait(20) == 7
    assert "nsa-ops resume" in (run.root / "runner.err").read_text()


def test_the_trainer_outlives_its_runner_and_still_keeps_others_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["sleep", 60]])
    runner = start("runner", run)
    trainer = trainer_of(run).trainer
    runner.kill()
    runner.wait(10)
    try:
        assert is_alive(trainer)
        with pytest.raises(LockHeldError):
            take_lock(run.runner_lock)
        assert start("runner", run).wait(20) == 7
    finally:
        kill(trainer)


def test_the_runner_survives_a_hangup_and_leads_the_trainer_into_its_own_session(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, [["sleep", 60]])
    runner = start("runner", run)
    trainer = trainer_of(run).trainer
    runner.send_signal(signal.SIGHUP)
    assert os.getsid(trainer.pid) == trainer.pid != os.getsid(runner.pid)
    kill(trainer)
    assert runner.wait(10) == 128 + 9


def test_terminating_the_runner_terminates_the_trainer_in_good_order(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["term_exit", 75], ["beat", 1], ["sleep", 60]])
    runner = start("runner", run)
    wait_for(lambda: run.heartbeat().exists() and run.heartbeat().read_text().count("\n") > 1)
    runner.terminate()
    assert runner.wait(10) == 75


def test_a_recycled_pid_is_not_taken_for_the_trainer() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        real = identify(sleeper.pid)
        assert not is_alive(real.model_copy(update={"start_ticks": real.start_ticks - 1}))
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_trainer_that_wrote_its_exit_and_does_not_go_can_still_be_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["linger", 0]])
    runner = start("runner", run)
    trainer = trainer_of(run).trainer
    wait_for(lambda: read_exit(run) is not None)
    assert act(HaltAction(run_dir=run.root, reason="r").model_dump_json().encode()).outcome == (
        "already"
    )
    asked = SignalAction(run_dir=run.root, signal="KILL")
    assert act(asked.model_dump_json().encode()).outcome == "done"
    runner.wait(10)
    assert not is_alive(trainer)
    assert act(asked.model_dump_json().encode()).outcome == "already"


IMPATIENT = """
import sys
from nsa_ops.pod import keep_watched, runner
keep_watched.LOOK_S = 1.5
sys.exit(runner.main(sys.argv[1:]))
"""


def test_a_watchdog_that_died_is_started_again_by_the_runner(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["wait_halt", 20], ["exit_record", 0]])
    dead = WatchdogRecord(
        run_id=run.run_id, attempt=1, verdict=Verdict(level="healthy"), doing="watching", ts=1.0,
        identity=ProcessIdentity(pid=2**22 - 1, start_ticks=1, boot_id="another boot"),
    )  # fmt: skip
    run.watchdog.write_text(dead.model_dump_json())
    words = ["--run-dir", str(run.root), "--module", FAKE]
    with subprocess.Popen([sys.executable, "-c", IMPATIENT, *words]) as runner:
        living = wait_for(lambda: (w := read_watchdog(run)) and is_alive(w.identity) and w)
        act(HaltAction(run_dir=run.root, reason="enough").model_dump_json().encode())
        assert runner.wait(20) == 10
    wait_for(lambda: not is_alive(living.identity))
    kinds = [event.kind for event in read_events(run)]
    assert kinds.count("watchdog_started") >= 1
    assert "not_restarted" in kinds
