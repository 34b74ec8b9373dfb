"""Two ranks of the real trainer, through the runner: they stop with a save, resume, and fail."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import is_alive
from nsa_ops.pod.act import act
from nsa_ops.pod.messages import SignalAction
from nsa_ops.pod.processes import read_processes
from nsa_ops.pod.trainer_group import TrainerGroup, group_of
from tests.integration.trainer_runs import (
    events,
    exit_of,
    losses,
    make_run,
    next_attempt,
    steps_logged,
    wait_for,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
#: Three processes load torch, on a machine that may be busy.
BUSY_S = 120.0


def begin(run: RunDir) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "nsa_ops.pod.runner", "--run-dir", str(run.root)],
        start_new_session=True,
    )


def group_at(run: RunDir, steps: int) -> TrainerGroup:
    """The ranks, once so many steps are in the table."""
    wait_for(lambda: steps_logged(run) >= steps, BUSY_S)
    group = group_of(run, read_processes(run))
    assert group is not None
    assert len(group.living()) == 2
    return group


def is_running(run: RunDir) -> bool:
    group = group_of(run, read_processes(run))
    return group is not None and is_alive(group.leader)


def send(run: RunDir, name: str) -> str:
    reply = act(SignalAction(run_dir=run.root, signal=name).model_dump_json().encode())
    assert (reply.code, reply.outcome) == (0, "done"), reply
    return reply.message


@pytest.fixture
def run(tmp_path: Path, shards: Path) -> Iterator[RunDir]:
    runtime = {"cpu_ranks": 2, "deterministic": True}
    never = {"save_every": 1000}
    run = make_run(tmp_path, shards, runtime=runtime, schedule={"steps": 4000}, checkpoint=never)
    yield run
    group = group_of(run, read_processes(run))
    if group is not None:
        group.kill()


def test_two_ranks_stop_with_a_save_resume_and_name_the_one_that_is_killed(run: RunDir) -> None:
    runner = begin(run)
    members = group_at(run, 6).members()
    assert send(run, "USR2") == f"sent USR2 to rank 0 (pid {members[0].pid})"
    asked_for = wait_for(lambda: {e.facts["step"] for e in events(run, "saved")})
    assert send(run, "USR1").count(" (pid ") == 2
    wait_for(lambda: all(run.stack_dump(rank).stat().st_size for rank in members))
    assert is_running(run)  # torchrun would have died of either signal
    begun = time.monotonic()
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(25) == 75
    assert time.monotonic() - begun < 25
    stopped = exit_of(run)
    assert (stopped.code, stopped.by) == (75, "trainer")
    assert stopped.checkpoint_step == stopped.step >= max(asked_for)
    assert "torch/distributed" not in run.log.read_text()
    assert not run.torchrun.exists()

    next_attempt(run)
    runner = begin(run)
    group = group_at(run, stopped.step + 3)
    assert events(run, "resumed")[-1].facts["step"] == stopped.step
    assert len({step for step, *_ in losses(run)}) == len(losses(run))
    os.kill(group.members()[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    assert runner.wait(30) == 128 + 9
    assert time.monotonic() - begun < 30
    assert not group.is_alive()
    assert not any(is_alive(member) for member in group.members().values())
    killed = exit_of(run)
    assert killed.reason.startswith("rank 1 of 2 was killed by SIGKILL at step ")
    assert killed.reason.endswith("; the other rank followed")
    assert (killed.code, killed.by) == (-9, "runner")
    assert killed.step > stopped.step
