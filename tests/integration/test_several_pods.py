"""One run on two pods with a network between them: real sshd, tmux, torchrun and gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.trainer_runs import write_text_once
from tests.integration.two_pods import BETWEEN, TwoPods, two_pods

pytestmark = [pytest.mark.integration, pytest.mark.slow]
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


def test_a_plan_finds_the_network_between_two_pods(pods: TwoPods) -> None:
    plan = pods.must("launch", "--pods", "a,b", *flags(pods), "--plan", "--json").data
    first, second, *rest = plan["notes"]
    assert first.startswith(f"node 0: pod a, rank 0, 10.213.{BETWEEN}.1 (nsa")
    assert first.endswith("all meet there on port 29500")
    assert second.startswith(f"node 1: pod b, rank 1, 10.213.{BETWEEN}.2 (nsa")
    assert any(note.startswith("slowest path: ") for note in rest)
    assert not (pods.a.root / "runs").exists() or not list((pods.a.root / "runs").iterdir())
