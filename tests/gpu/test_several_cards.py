"""Ranks on cards talk through NCCL: the group on all cards of a machine, runs where it has two."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_core.rundir.layout import RunDir
from tests.core.train.sessions import new_run, write_texts

pytestmark = pytest.mark.gpu
LIMIT_S = 180
NUM_CARDS = torch.cuda.device_count()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_every_collective_of_the_group_works_on_all_cards() -> None:
    shared = {
        "WORLD_SIZE": str(NUM_CARDS), "LOCAL_WORLD_SIZE": str(NUM_CARDS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.group_process"],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_CARDS)
    ]
    for process in started:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out.splitlines()[-1:]) == (0, ["ok"]), out


def losses(root: Path, text: Path, name: str, num_gpus: int, sharding: str) -> list[float]:
    """Train a small run on so many cards."""
    run = new_run(
        root, text, run_id=name,
        batch={"accumulation": 4, "micro_batch": 1},
        schedule={"steps": 6, "warmup_steps": 0, "kind": "constant"},
        telemetry={"log_every": 1},
        runtime={
            "num_gpus": num_gpus, "sharding": sharding, "precision": "fp32", "device": "cuda",
        },
    )  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]
    words = [
        *(torchrun if num_gpus > 1 else []),
        "-m",
        "nsa_core.train",
        "--run-dir",
        str(run.root),
    ]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return read_losses(run)


def read_losses(run: RunDir) -> list[float]:
    with run.training_csv.open(encoding="utf-8", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.skipif(NUM_CARDS < 2, reason="needs two cards")
def test_two_cards_train_as_one(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    write_texts(text)
    one = losses(tmp_path, text, "one", 1, "auto")
    assert len(one) == 6
    for sharding in ("ddp", "fsdp"):
        assert losses(tmp_path, text, sharding, 2, sharding) == pytest.approx(one, rel=1e-4)
