"""Ranks under a real torchrun: they end together, and whoever failed first is named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import ExitRecord, read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_core.rundir.process import is_alive
from nsa_ops.pod.act import act
from nsa_ops.pod.messages import NextAttemptAction
from nsa_ops.pod.processes import read_processes
from nsa_ops.pod.stacks import HangReport
from nsa_ops.pod.trainer_group import TrainerGroup, group_of
from tests.integration.pod_runs import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TRAINER = "tests.integration.rank_trainer"
#: torchrun loads torch, which takes seconds, and more on a busy machine.
START_S = 90.0
#: A runner that gives the ranks after a killed one less than the 25.5 s that they have.
IMPATIENT = """
import importlib, sys
from nsa_ops.pod import rank_watch
rank_watch.TOGETHER_S = 3.0
part = importlib.import_module(f"nsa_ops.pod.{sys.argv[1]}")
sys.exit(part.main(sys.argv[2:]))
"""
Start = Callable[..., tuple[RunDir, subprocess.Popen[bytes]]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """Start a runner, and perhaps a watchdog, on a run of two ranks; all is killed in the end."""
    started: list[tuple[RunDir, list[subprocess.Popen[bytes]]]] = []

    def begin(
        *scripts: list[list[Any]], parts: tuple[str, ...] = ("runner",), **limits: float
    ) -> tuple[RunDir, subprocess.Popen[bytes]]:
        run = RunDir(tmp_path / "run-1")
        run.root.mkdir()
        config = {"runtime": {"cpu_ranks": 2}, "batch": {"accumulation": 2}, "watchdog": limits}
        write_manifest(
            run,
            RunManifest(
                run_id=run.run_id, config=RunConfig.model_validate(config),
                config_sha256="0" * 64, created_unix_s=time.time(),
            ),
        )  # fmt: skip
        (run.root / "script.json").write_text(json.dumps(scripts))
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", IMPATIENT, part, "--run-dir", str(run.root),
                 "--module", TRAINER],
                start_new_session=True,
            )
            for part in parts
        ]  # fmt: skip
        started.append((run, processes))
        return run, processes[-1]

    yield begin
    for run, processes in started:
        for process in processes:
            process.kill()
            process.wait()
        group = group_of(run, read_processes(run))
        if group is not None:
            group.kill()


def group_when(run: RunDir, num_ranks: int = 2) -> TrainerGroup:
    """The group of the run once so many ranks beat."""

    def beats() -> TrainerGroup | None:
        group = group_of(run, read_processes(run))
        there = group is not None and len(group.living()) == num_ranks
        return group if there and all(run.heartbeat(r).exists() for r in (0, 1)) else None

    found: TrainerGroup = wait_for(beats, START_S)
    return found


def ended(run: RunDir) -> ExitRecord:
    record = read_exit(run)
    assert record is not None
    return record


def test_a_rank_that_is_killed_is_named_and_everything_ends_in_time(begin: Start) -> None:
    """The other rank ignores TERM, so that torchrun alone would wait for 30 s."""
    stubborn = [["ignore_term", 0], ["beat", 7], ["sleep", 120]]
    run, runner = begin(stubborn, [["beat", 5], ["sleep", 120]])
    group = group_when(run)
    members = group.members()
    os.kill(members[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    assert runner.wait(29) == 128 + 9
    assert time.monotonic() - begun < 29
    assert not group.is_alive()
    assert ended(run).reason == (
        "rank 1 of 2 was killed by SIGKILL at step 5 (out of host memory, or by hand); "
        "the other rank followed"
    )
    assert (ended(run).code, ended(run).step, ended(run).by) == (-9, 7, "runner")
    asked = NextAttemptAction(run_dir=run.root, from_attempt=1, changes={"resume": "auto"})
    assert act(asked.model_dump_json().encode()).outcome == "done"


def test_a_stopped_rank_is_named_by_the_watchdog_which_ends_all(begin: Start) -> None:
    quick = {
        "interval_s": 0.2, "ack_grace_s": 0.5, "term_grace_s": 1.0, "stall_min_s": 4.0,
        "phase_limit_s": 5.0, "stale_warn_s": 100.0, "stale_halt_s": 100.0,
        "restart_budget": 0,
    }  # fmt: skip
    waiting = [["beat", 4], ["sleep", 120]]
    run, watchdog = begin(
        [["follow_at_term", 16], *waiting], waiting, parts=("runner", "watchdog"), **quick
    )
    group = group_when(run)
    os.kill(group.members()[1].pid, signal.SIGSTOP)
    assert watchdog.wait(60) == 0
    assert not group.is_alive()
    report = HangReport.model_validate_json(run.hang_report.read_bytes())
    assert [one.ranks for one in report.groups] == [[0]]
    assert report.odd == "rank 1 is stopped (SIGSTOP); SIGCONT lets it continue"
    assert report.places == {0: "train, step 4", 1: "train, step 4"}
    signals = [e.facts["signal"] for e in read_events(run) if e.kind == "signal"]
    assert signals == ["TERM", "KILL"]
    assert ended(run).code == 16
    pid = group.members()[1].pid
    assert ended(run).reason.startswith(
        f"rank 1 of 2 was stuck at step 4 in phase train, pid {pid} and had to be killed "
        "(watchdog: stall: "
    )
    assert "; rank 1 is stopped (SIGSTOP)" in ended(run).reason
    assert not is_alive(group.leader)
