"""One run on two pods with a network between them: real sshd, tmux, torchrun and gloo."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.rundir.process import ProcessIdentity, is_alive
from nsa_core.rundir.ranks import read_rank_process
from nsa_ops.pod.processes import read_processes
from tests.integration.pod_runs import wait_for
from tests.integration.trainer_runs import write_text_once
from tests.integration.two_pods import BETWEEN, NamespacePod, TwoPods, two_pods

pytestmark = [pytest.mark.integration, pytest.mark.slow]
RUN = "r1"
SETS = (
    "batch.accumulation=2", "batch.micro_batch=2", "batch.seq_len=64", "schedule.steps=4900",
    "checkpoint.save_every=10", "telemetry.log_every=1", "telemetry.beat_interval_s=0.5",
    "telemetry.tensorboard=false", "evaluation.eval_every=0", "runtime.threads=1",
    "data.source=fineweb_edu_local", "runtime.collective_timeout_s=20",
)  # fmt: skip


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[TwoPods]:
    with two_pods(tmp_path) as both:
        yield both


def flags(pods: TwoPods) -> list[str]:
    text = write_text_once(pods.folder / "text.jsonl")
    sets = [word for one in (*SETS, f"data.path={text}") for word in ("--set", one)]
    return ["--recipe", "tiny-cpu", "--override", "preflight=a test", *sets]


def test_a_plan_shows_who_meets_where(pods: TwoPods) -> None:
    plan = pods.must("launch", "--pods", "a,b", *flags(pods), "--plan", "--json").data
    print(json.dumps(plan, indent=1))
