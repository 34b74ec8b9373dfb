"""One run on two pods with a network between them: real sshd, tmux, torchrun and gloo."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.exit import ExitRecord, read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import read_manifest
from nsa_core.rundir.process import ProcessIdentity, is_alive
from nsa_core.rundir.ranks import read_rank_process
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import read_processes
from tests.integration.pod_runs import wait_for
from tests.integration.trainer_runs import write_text_once
from tests.integration.two_pods import BETWEEN, RATE_MB_PER_S, NamespacePod, TwoPods, two_pods

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
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
    return ["--run-id", "r1", "--recipe", "tiny-cpu", "--override", "preflight=a test", *sets]


def steps_of(pod: NamespacePod, rank: int, attempt: int) -> dict[int, Heartbeat]:
    """Records of training steps of one rank, by step."""
    beats = read_records(pod.run_dir("r1").heartbeat(rank), Heartbeat).records
    return {beat.step: beat for beat in beats if beat.attempt == attempt and beat.msg == "progress"}


def ended(pod: NamespacePod) -> ExitRecord | None:
    return read_exit(pod.run_dir("r1"), read_manifest(pod.run_dir("r1")).attempt)


def processes_of(pod: NamespacePod, rank: int) -> list[ProcessIdentity]:
    """Watchdog, runner, torchrun and rank of the attempt, in the order in which they are ended."""
    run = pod.run_dir("r1")
    record, watchdog = read_processes(run), read_watchdog(run)
    own = read_rank_process(run, rank, read_manifest(run).attempt)
    assert record is not None
    assert record.trainer is not None
    assert watchdog is not None
    assert own is not None
    return [watchdog.identity, record.runner, record.trainer, own.process]


def test_two_pods_train_halt_and_continue_as_one_run(pods: TwoPods) -> None:
    said = pods.must("launch", "--pods", "a,b", *flags(pods), "--json")
    assert f"node 0: pod a, rank 0, {pods.network}.{BETWEEN}.1 (nsa" in said.err, said.err
    assert f"node 1: pod b, rank 1, {pods.network}.{BETWEEN}.2 (nsa" in said.err
    speed = float(said.err.split("slowest path: ")[1].split(" with ")[1].split()[0])
    assert not pods.is_slow or RATE_MB_PER_S / 10 < speed <= RATE_MB_PER_S * 1.1
    assert (said.data["pods"], said.data["state"]) == (["a", "b"], "running")
    status = pods.must("status", "--json").data["report"]
    assert [(one["pod"], one["state"]) for one in status["pods"]] == [
        ("a", "running"), ("b", "running"),
    ]  # fmt: skip
    wait_for(lambda: len(steps_of(pods.a, 0, 1)) > 14, 60)
    halted = pods.must("halt", "--json").data
    assert (halted["state"], halted["signals"], halted["lost_steps"]) == ("halted", [], 0)
    ends = [ended(pod) for pod in (pods.a, pods.b)]
    assert [one and (one.code, one.step) for one in ends] == [(10, halted["step"])] * 2
    theirs, ours = steps_of(pods.b, 1, 1), steps_of(pods.a, 0, 1)
    assert sorted(theirs) == sorted(ours)
    assert list_checkpoints(pods.b.run_dir("r1")) == []

    _, before, *_ = list_checkpoints(pods.a.run_dir("r1"))
    resumed = pods.must("resume", "--from", str(before.path), "--json").data
    assert (resumed["attempt"], resumed["pods"]) == (2, ["a", "b"])
    assert resumed["from_step"] == before.step
    wait_for(lambda: max(steps_of(pods.a, 0, 2), default=0) > max(ours), 60)
    again = steps_of(pods.a, 0, 2)
    repeated = [step for step in ours if step > before.step]
    assert repeated
    assert [again[step].loss for step in repeated] == [ours[step].loss for step in repeated]

    killed_s = time.monotonic()
    for process in processes_of(pods.b, 1):
        if is_alive(process):
            os.kill(process.pid, signal.SIGKILL)
    end = wait_for(lambda: ended(pods.a), 40)
    assert time.monotonic() - killed_s < 30
    assert end.code not in (0, 10)
    lost = pods.must("status", "--json").data["report"]
    assert "pod `b` is lost" in lost["why"], lost["why"]

    saved = list_checkpoints(pods.a.run_dir("r1"))[0].step
    alone = pods.must("resume", "--pods", "a", "--json").data
    assert (alone["attempt"], alone["from_step"], alone["pods"]) == (3, saved, [])
    changed = [one for one in alone["differences"] if one["key"] == "runtime.num_pods"]
    assert [(one["before"], one["now"]) for one in changed] == [(2, 1)]
    wait_for(lambda: steps_of(pods.a, 0, 3), 60)
    assert min(steps_of(pods.a, 0, 3)) == saved + 1
    assert pods.must("halt", "--json").data["state"] == "halted"
