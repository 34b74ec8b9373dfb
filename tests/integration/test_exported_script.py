"""An exported Slurm script as Slurm runs it: two nodes train, are stopped, continue and finish.

Both nodes are this machine. `srun` and `scontrol` are stand-ins that start a task a node with its
variables and write down what is queued again; everything else is what a node does: the code is
unpacked, and torchrun starts the trainer with gloo.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.events import find_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_ops.pod.journal import read_watchdog
from tests.integration.pod_runs import wait_for
from tests.ops.cli_case import CommandLine

#: Four starts of torch at once, and four more, beside other tests.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 60
SETS = (
    f"schedule.steps={STEPS}", "schedule.warmup_steps=10", "batch.seq_len=64",
    "batch.micro_batch=2", "batch.accumulation=2", "data.max_tokens=60000",
    "checkpoint.save_every=1000", "evaluation.eval_every=0", "evaluation.sample_tokens=0",
    "telemetry.log_every=1", "telemetry.tensorboard=false", "telemetry.beat_interval_s=0.5",
    "runtime.threads=1", "watchdog.interval_s=0.5",
)  # fmt: skip
BUSY_S = 200.0
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do
  SLURM_PROCID=$rank "$@" &
  pids+=($!)
done
printf '%s\\n' "${pids[@]}" >"$TASKS.part" && mv "$TASKS.part" "$TASKS"
highest=0
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code=$?
  ((code > highest)) && highest=$code
done
rm -f "$TASKS"
exit "$highest"
"""
SCONTROL = """#!/bin/sh
case $1 in
show) echo 127.0.0.1 ;;
requeue) echo "$2" >>"$QUEUED" ;;
esac
"""


class Cluster:
    """A folder that all nodes share, and what runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks, self.queued = folder / "tasks", folder / "queued"
        self.job: subprocess.Popen[bytes] | None = None
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.job_id = str(free_job_id())

    def run_of(self, rank: int) -> RunDir:
        return RunDir(self.folder / "nsa" / f"node_{rank}" / "runs" / "r1")

    def start(self, restarts: int) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if "NSA_" not in name}
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        with (self.folder / "job.log").open("ab") as log:
            self.job = subprocess.Popen(
                ["bash", "train.sh"],
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment | {
                    "PATH": path, "TASKS": str(self.tasks), "QUEUED": str(self.queued),
                    "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": self.job_id,
                    "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "2",
                    "SLURM_RESTART_COUNT": str(restarts),
                },
            )  # fmt: skip
        return self.job

    def last_step(self, rank: int) -> int:
        beats = read_last_records(self.run_of(rank).heartbeat(rank), Heartbeat).records
        return max((beat.step for beat in beats), default=0)

    def end(self) -> None:
        """TERM to what still runs, which takes its trainers with it."""
        if self.tasks.exists():
            for pid in self.tasks.read_text().split():
                os.kill(int(pid), signal.SIGTERM)
        if self.job is not None and self.job.poll() is None:
            self.job.wait(60)


def free_job_id() -> int:
    """A job whose port, 29500 and its last three digits, nobody has."""
    for number in range(os.getpid() % 1000, os.getpid() % 1000 + 1000):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", 29_500 + number % 1000))
            except OSError:
                continue
            return 4000 + number % 1000
    message = "no port from 29500 to 30499 is free"
    raise AssertionError(message)


def test_two_nodes_train_are_stopped_continue_and_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_OPS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "a folder with 'quotes' $(and) more"
    folder.mkdir()
    sets = [word for one in SETS for word in ("--set", one)]
    said = CommandLine(capsys)(
        "export", "--to", "slurm", "--recipe", "tiny-cpu", "--profile", "cpu", "--nodes", "2",
        "--run-id", "r1", "--output", str(folder / "train.sh"), *sets,
    )  # fmt: skip
    assert said.exit_code == 0, said.err
    cluster = Cluster(folder)
    log = folder / "job.log"
    try:
        job = cluster.start(restarts=0)
        wait_for(lambda: cluster.last_step(1) >= 2 or job.poll() is not None, BUSY_S)
        assert job.poll() is None, log.read_text()
        for pid in cluster.tasks.read_text().split():  # the job steps get it, not the shell
            os.kill(int(pid), signal.SIGTERM)
        assert job.wait(90) == 75, log.read_text()
        assert cluster.queued.read_text().split() == [cluster.job_id]
        first = cluster.run_of(0)
        stopped = read_exit(first)
        assert stopped is not None
        assert 0 < stopped.step < STEPS
        assert first.latest.read_text().strip() == f"step_{stopped.step:06d}"
        assert not cluster.run_of(1).checkpoints.exists()

        assert cluster.start(restarts=1).wait(BUSY_S) == 0, log.read_text()
        ends = [read_exit(cluster.run_of(rank)) for rank in (0, 1)]
        assert [end and (end.code, end.step, end.attempt) for end in ends] == [(0, STEPS, 2)] * 2
        assert read_manifest(first).config.runtime.num_pods == 2
        rows = first.training_csv.read_text().splitlines()[1:]
        assert [int(row.split(",")[0]) for row in rows] == list(range(1, STEPS + 1))

        for rank in (0, 1):
            run = cluster.run_of(rank)
            assert not find_events(run, "left_over_killed"), "nothing of a node is a left-over"
            watchdog = read_watchdog(run)
            assert watchdog is not None
            assert watchdog.doing == "done"

        assert cluster.start(restarts=2).wait(60) == 0
        assert read_manifest(first).attempt == 2
        assert cluster.queued.read_text().split() == [cluster.job_id]
    finally:
        cluster.end()
