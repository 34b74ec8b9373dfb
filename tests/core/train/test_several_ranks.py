"""Several ranks compute what one does: the same data exactly, the same losses within rounding."""

import csv
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.checkpoint import inspect_checkpoint, list_checkpoints, read_checkpoint
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import begin_next_attempt, read_manifest
from nsa_core.rundir.ranks import read_rank_end
from nsa_core.train.attempt import TrainerAttempt
from nsa_core.train.checkpoint_files import read_random, read_state
from nsa_core.train.random_state import read_random_state, seed_everything
from tests.core.train.rank_process import gradients_file
from tests.core.train.sessions import SMALL, new_run, run_here, saved

STEPS = 6
#: Recomputing gathers the weights of a block once more.
SHARDED = {"sharding": "fsdp", "activation_checkpointing": "full"}
LIMIT_S = 400
#: Sums in another order differ in the last bits of float32, and six steps let that grow: 1e-7 was
#: the largest relative difference with 2 and with 4 ranks (torch 2.13, CPU, 2026-11-29).
RELATIVE = 2e-6


def make(
    root: Path, text: Path, run_id: str, *, ranks: int, steps: int = STEPS, **runtime: str
) -> RunDir:
    """A run of four micro-batches a step."""
    return new_run(
        root, text, run_id=run_id,
        batch={"accumulation": 4, "micro_batch": 1},
        schedule={"steps": steps, "warmup_steps": 0, "kind": "constant"},
        evaluation={"eval_every": 3, "eval_batches": 3},
        checkpoint={"save_every": 3, "keep_last": 9},
        telemetry={"log_every": 1},
        runtime={"cpu_ranks": ranks, "precision": "fp32", "device": "cpu", **runtime},
    )  # fmt: skip


def train(ranks: int, *runs: RunDir) -> list[list[int]]:
    """Train on several ranks; the exit codes of each process, by rank and run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.core.train.rank_process", str(port)]
    shared = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [*words, *(str(run.root) for run in runs)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    end, codes = time.monotonic() + LIMIT_S, []
    try:
        for process in started:
            out, err = process.communicate(timeout=max(1, end - time.monotonic()))
            assert process.returncode == 0, err
            codes.append([int(line) for line in out.split()])
    finally:
        for process in started:
            process.kill()
    return codes


def continue_with(run: RunDir, *, ranks: int, steps: int) -> None:
    """Begin the next attempt with another number of ranks, up to a later step."""
    old = read_manifest(run)
    values = old.config.model_dump()
    values["schedule"]["steps"], values["runtime"]["cpu_ranks"] = steps, ranks
    wanted = old.model_copy(update={"config": type(old.config).model_validate(values)})
    begin_next_attempt(run, at_unix_s=time.time(), wanted=wanted)


def column_of(run: RunDir, column: str = "loss") -> list[float]:
    with run.training_csv.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row[column]) for row in rows]


def validations(run: RunDir) -> list[tuple[str, ...]]:
    with run.validation_csv.open(encoding="utf-8", newline="") as file:
        return [(row["step"], row["tokens"], row["bytes"]) for row in csv.DictReader(file)]


def loader_states(run: RunDir, steps: Sequence[int]) -> list[object]:
    return [read_state(run.checkpoint(step)).loader for step in steps]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """One rank; two ranks; two, then one, then two; two and again two; one rank without data.

    All of several ranks but the last one also in shards. After it, rank 1 has no data any more.
    """
    root = tmp_path_factory.mktemp("ranks")
    one = make(root, text, "one", ranks=1)
    two = make(root, text, "two", ranks=2)
    mixed = make(root, text, "mixed", ranks=2, steps=2)
    again = make(root, text, "again", ranks=2, steps=3)
    faulty = make(root, text, "no-data", ranks=2)
    shards = make(root, text, "shards", ranks=2, **SHARDED)
    shards_mixed = make(root, text, "shards-mixed", ranks=2, steps=2, sharding="fsdp")
    shards_again = make(root, text, "shards-again", ranks=2, steps=3, **SHARDED)
    run_here(one)
    first = (two, mixed, again, shards, shards_mixed, shards_again, faulty)
    assert train(2, *first) == [[0] * len(first)] * 2
    for run in (mixed, shards_mixed):
        continue_with(run, ranks=1, steps=4)
        run_here(run)
        continue_with(run, ranks=2, steps=STEPS)
    for run in (again, shards_again):
        continue_with(run, ranks=2, steps=STEPS)
    assert train(2, mixed, again, shards_mixed, shards_again) == [[0] * 4] * 2
    return {run.run_id: run for run in (one, *first)}


@pytest.mark.parametrize("other", ["two", "mixed", "shards", "shards-mixed"])
def test_ranks_share_a_step_and_its_loss_stays_that_of_one(
    trained: dict[str, RunDir], other: str
) -> None:
    one, several = trained["one"], trained[other]
    for column in ("loss", "grad_norm", "tokens"):
        assert column_of(several, column) == pytest.approx(column_of(one, column), rel=RELATIVE)
    assert len(column_of(one)) == STEPS
    kept = [STEPS] if other.endswith("mixed") else [3, STEPS]
    assert loader_states(several, kept) == loader_states(one, kept)
    assert validations(several)[-1] == validations(one)[-1]


@pytest.mark.parametrize(("whole", "parts"), [("two", "again"), ("shards", "shards-again")])
def test_a_resume_with_as_many_ranks_is_exact(
    trained: dict[str, RunDir], whole: str, parts: str
) -> None:
    straight, resumed = trained[whole], trained[parts]
    assert column_of(resumed) == column_of(straight)
    for first, second in zip(saved(straight, STEPS), saved(resumed, STEPS), strict=True):
        assert first.keys() == second.keys()
        assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_stay_in_the_buckets_that_are_summed(
    trained: dict[str, RunDir], rank: int
) -> None:
    """Micro-batches that add them up beside the buckets would keep them twice."""
    steps = json.loads(gradients_file(trained["two"], rank).read_text())
    assert len(steps) == STEPS
    for held, summed in steps:
        assert held == summed
        assert 0 not in held
        assert len(set(held)) < len(held)  # a bucket has several
    assert all(step == steps[1] for step in steps[1:])  # the first one decides what they hold


@pytest.mark.parametrize("run_id", ["two", "shards"])
def test_a_checkpoint_has_the_generators_of_every_rank(
    trained: dict[str, RunDir], run_id: str
) -> None:
    folder = trained[run_id].checkpoint(STEPS)
    found = read_checkpoint(folder)
    assert found is not None
    states = read_random(folder, found.manifest)
    assert len(states) == 2
    for rank, state in enumerate(states):  # nothing draws from them in a step
        seed_everything(SMALL["seed"], rank)
        assert state.words == read_random_state(torch.device("cpu")).words


def test_the_final_model_of_shards_is_that_of_one_rank(trained: dict[str, RunDir]) -> None:
    one, shards = (load_file(trained[run_id].final_model) for run_id in ("one", "shards"))
    assert one.keys() == shards.keys()
    for name, tensor in one.items():
        assert torch.allclose(shards[name], tensor, rtol=1e-3, atol=1e-5), name
    folder = trained["shards"].checkpoint(STEPS)
    held = [load_file(folder / f"model_rank{rank}.safetensors") for rank in (0, 1)]
    assert torch.cat([part["norm.weight"] for part in held]).equal(shards["norm.weight"])
    sizes = [sum(tensor.numel() for tensor in part.values()) for part in held]
    assert max(sizes) < 0.51 * sum(sizes)


def test_a_kill_of_a_rank_in_a_save_leaves_the_checkpoint_before_for_any_number_of_ranks(
    text: Path, tmp_path: Path
) -> None:
    """Rank 1 kills itself, as rank_process.py lets it, when half of its second save is written."""
    run = make(tmp_path, text, "killed-in-a-save", ranks=2, sharding="fsdp")
    with pytest.raises(AssertionError):
        train(2, run)
    assert [one.step for one in list_checkpoints(run)] == [3]
    assert not inspect_checkpoint(run.checkpoint(3)).damage
    ended = read_rank_end(run, 0, attempt=1)
    assert ended is not None
    assert ended.follows
    assert read_rank_end(run, 1, attempt=1) is None
    continue_with(run, ranks=1, steps=STEPS)
    run_here(run)
    assert [one.step for one in list_checkpoints(run)] == [STEPS, 3]
    assert not list(run.checkpoints.glob(".writing_*"))


def test_every_rank_has_heartbeats_and_leaves_its_end(trained: dict[str, RunDir]) -> None:
    run = trained["two"]
    for rank in (0, 1):
        beats = read_last_records(run.heartbeat(rank), Heartbeat).records
        progress = [beat for beat in beats if beat.msg == "progress"]
        assert [beat.step for beat in progress] == list(range(1, STEPS + 1))
        assert all((beat.work_s or 0) > 0 and beat.sync_s is not None for beat in progress)
        assert all((beat.loss is None) == (rank == 1) for beat in progress)
        for beat in progress[1:] if rank == 0 else ():  # the first one is not counted
            tokens = (beat.tokens_per_s or 0) * ((beat.step_s or 0) + (beat.data_s or 0))
            assert tokens == pytest.approx(4 * SMALL["batch"]["seq_len"], rel=0.01)
        end = read_rank_end(run, rank, attempt=1)
        assert end is not None
        assert (end.code, end.step, end.follows) == (0, STEPS, False)


def test_a_rank_without_data_ends_all_after_the_same_step(trained: dict[str, RunDir]) -> None:
    run = trained["no-data"]
    ended = read_exit(run)
    assert ended is not None
    assert (ended.code, ended.step, ended.checkpoint_step) == (14, 1, 1)
    assert ended.reason == "rank 1 has no data: the disk is gone"
    other = read_rank_end(run, 1, attempt=1)
    assert other is not None
    assert (other.code, other.reason) == (14, "the disk is gone")


def test_four_ranks_train_as_one(trained: dict[str, RunDir], text: Path, tmp_path: Path) -> None:
    four = make(tmp_path, text, "four", ranks=4)
    assert train(4, four) == [[0]] * 4
    assert column_of(four) == pytest.approx(column_of(trained["one"]), rel=RELATIVE)


def test_as_many_processes_as_ranks_are_needed(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, text, "few", ranks=2)
    assert TrainerAttempt(run, read_manifest(run)).run() == 2
    assert "1 processes were started, and the run has 2 ranks" in capfd.readouterr().err
