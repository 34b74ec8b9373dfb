"""Stops and signals: nothing is lost, nothing runs on, nobody else's request counts."""

import signal
import time
from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from tests.integration import trainer_faults as faults
from tests.integration.trainer_runs import (
    events,
    exit_of,
    finish,
    losses,
    make_run,
    next_attempt,
    start,
    stderr,
    steps_logged,
    wait_for,
)

pytestmark = pytest.mark.integration


def beats(run):
    return read_records(run.heartbeat(), Heartbeat).records


def ask_to_halt(run, attempt: int = 1, **fields) -> None:
    request = HaltRequest(
        run_id="r1", attempt=attempt, reason="enough", by="operator", at=time.time(), **fields
    )
    write_halt(run, request)


def test_a_halt_saves_acknowledges_and_the_next_attempt_continues_exactly(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    child = start(run)
    wait_for(lambda: steps_logged(run) >= 5)
    ask_to_halt(run)
    assert child.wait() == 10
    ended = exit_of(run)
    assert ended.checkpoint_step == ended.step == list_checkpoints(run)[0].step
    assert "enough" in ended.reason
    assert events(run, "halt_ack")[0].facts["checkpoint_step"] == ended.step
    assert beats(run)[-2].msg == "halt_ack"

    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert events(run, "stale_halt") == []
    assert (run.attempt(1) / ".HALT").exists()
    assert losses(run) == losses(undisturbed)


def test_term_saves_and_the_next_attempt_continues_exactly(
    tmp_path: Path, shards: Path, undisturbed: RunDir
) -> None:
    run = make_run(tmp_path, shards)
    child = start(run)
    wait_for(lambda: steps_logged(run) >= 5)
    began = time.monotonic()
    child.send(signal.SIGTERM)
    assert child.wait() == 75
    assert time.monotonic() - began < 25
    assert exit_of(run).checkpoint_step == exit_of(run).step
    next_attempt(run)
    assert finish(run) == 0, stderr(run)
    assert losses(run) == losses(undisturbed)


def test_term_is_noticed_while_waiting_for_data(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards, data={"prefetch": 0})
    child = start(run, faults.data_hangs_after_step_5)
    wait_for(lambda: beats(run) and beats(run)[-1].phase == "data_wait")
    child.send(signal.SIGTERM)
    assert child.wait(10) == 75
    assert exit_of(run).checkpoint_step == 5


def test_term_while_staging_keeps_the_step_of_the_run(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    child = start(run)
    wait_for(lambda: events(run, "saved"))
    child.kill()
    newest = list_checkpoints(run)[0].step
    next_attempt(run)
    assert start(run, faults.term_while_staging).wait() == 75
    assert (exit_of(run).step, exit_of(run).checkpoint_step) == (newest, newest)


def test_a_halt_is_noticed_inside_an_evaluation(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards, evaluation={"eval_batches": 500})
    child = start(run, faults.slow_evaluation)
    wait_for(lambda: beats(run) and beats(run)[-1].phase == "eval")
    ask_to_halt(run)
    assert child.wait(10) == 10


def test_usr2_saves_and_the_run_goes_on_and_usr1_writes_stacks(
    tmp_path: Path, shards: Path
) -> None:
    run = make_run(tmp_path, shards, schedule={"steps": 40}, checkpoint={"save_every": 0})
    child = start(run)
    wait_for(lambda: steps_logged(run) >= 5)
    child.send(signal.SIGUSR1)
    child.send(signal.SIGUSR2)
    wait_for(lambda: events(run, "saved"))
    assert child.wait() == 0
    saved = [event.facts["step"] for event in events(run, "saved")]
    assert len(saved) == 2
    assert 5 <= saved[0] < saved[1] == 40
    assert "run_training" in run.stack_dump().read_text()


def test_usr2_before_torch_is_loaded_does_not_kill_the_run(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards, schedule={"steps": 2})
    child = start(run)
    wait_for(run.stack_dump().exists)
    child.send(signal.SIGUSR2)
    assert child.wait() == 0


def test_a_second_trainer_leaves_the_first_alone(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards)
    child = start(run)
    wait_for(lambda: steps_logged(run) >= 2)
    child.send(signal.SIGSTOP)
    try:
        assert finish(run) == 93
        assert not run.exit.exists()
    finally:
        child.send(signal.SIGCONT)
    assert child.wait() == 0


def test_an_attempt_that_has_ended_is_not_run_again(tmp_path: Path, shards: Path) -> None:
    run = make_run(tmp_path, shards, schedule={"steps": 2})
    assert finish(run) == 0
    before = run.exit.read_bytes()
    assert finish(run) == 93
    assert run.exit.read_bytes() == before
    assert "nsa-ops resume" in stderr(run)
