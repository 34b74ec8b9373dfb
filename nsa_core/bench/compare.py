"""Train NSA and the dense control through the trainer, on the same data, and set them side by side.

All runs have the same tokens, seed, steps and everything else but the attention, or but the
settings that are tried; each is a process of its own, as `nsa-ops launch` would start it, and
everything is read from its run directory.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.bench.command import Bench, Column, Table, add_repeatable, without_folders
from nsa_core.bench.trials import BASE, plan_trials
from nsa_core.config.base import ConfigError
from nsa_core.config.recipe import ResolvedConfig
from nsa_core.data.reporting import DataError
from nsa_core.data.shards import read_hashes
from nsa_core.data.staging import StagedData, stage
from nsa_core.env import trainer_environment
from nsa_core.rundir.bench_result import Machine
from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.goodput import read_goodput
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest, write_manifest
from nsa_core.terminal import tell

#: NSA, or a setting, may be so much worse on held-out text before the comparison counts as failed.
MAX_EXCESS_BITS_PER_BYTE = 0.02
_LOG_TAIL_LINES = 20


class RunFailedError(ValueError):
    """A run of the comparison did not finish; the message holds the end of its log."""


@dataclass(frozen=True)
class DataFacts:
    """The text that all runs saw, and the held-out text; `shared_documents` must be 0."""

    manifest_sha256: str
    tokenizer: str
    vocab_size: int
    train_documents: int
    train_tokens: int
    train_bytes: int
    held_out_documents: int
    held_out_tokens: int
    held_out_bytes: int
    shared_documents: int


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes:
        name: `nsa` or `dense`; where settings are tried, `base` or the setting.
        attention: `nsa` or `dense`.
        seed: Of weights and order of samples.
        T: Tokens of a row.
        tokens_per_step: Tokens of an optimizer step.
        steps: Optimizer steps.
        tokens: Tokens seen.
        num_parameters: Trained numbers.
        tokens_per_s: Median over the logged intervals, compilation excluded.
        mfu: At that rate, on the run's own FLOPs; None on an unknown card.
        peak_mib: Most memory of the card that the run allocated; None without a card.
        wall_s: From launch to the end.
        goodput: Share of it that trained.
        buckets_s: Where every second went.
        learning_rate: Peak.
        overrides: Values that the command set.
        kernels: Which code computed each branch and the loss.
        held_out_targets: Tokens that were predicted at a validation.
        bits_per_byte: On the held-out documents at the end.
        loss_curve: (step, tokens, loss in nats) of the logged steps.
        validation: (step, loss in nats, bits per byte) of every validation.
        data: The text.
    """

    name: str
    attention: str
    seed: int
    T: int
    tokens_per_step: int
    steps: int
    tokens: int
    num_parameters: int
    tokens_per_s: float | None
    mfu: float | None
    peak_mib: int | None
    wall_s: float
    goodput: float
    buckets_s: dict[str, float]
    learning_rate: float
    overrides: tuple[str, ...]
    kernels: dict[str, str]
    held_out_targets: int
    bits_per_byte: float
    loss_curve: list[tuple[int, int, float]]
    validation: list[tuple[int, float, float]]
    data: DataFacts


def read_data_facts(staged: StagedData) -> DataFacts:
    """Count the splits, and the documents that are in both."""
    by_split = {
        split: [shard for shard in staged.manifest.shards if shard.split == split]
        for split in ("train", "validation")
    }
    train, held_out = (read_hashes(staged.folder, shards) for shards in by_split.values())
    train_tokens, train_documents, train_bytes = staged.manifest.total("train")
    tokens, documents, num_bytes = staged.manifest.total("validation")
    return DataFacts(
        manifest_sha256=staged.manifest_sha256,
        tokenizer=staged.manifest.tokenizer.name,
        vocab_size=staged.manifest.tokenizer.vocab_size,
        train_documents=train_documents,
        train_tokens=train_tokens,
        train_bytes=train_bytes,
        held_out_documents=documents,
        held_out_tokens=tokens,
        held_out_bytes=num_bytes,
        shared_documents=len(train & held_out),
    )


def read_run_row(run: RunDir, name: str, data: DataFacts, overrides: tuple[str, ...]) -> RunRow:
    """Read a run that has finished.

    Raises:
        ValueError: If the run left no logged step, no validation or no account of its time.
    """
    config = read_manifest(run).config
    metrics: dict[str, Any] = json.loads(run.metrics.read_bytes())
    curve = [(int(r["step"]), int(r["tokens"]), float(r["loss"])) for r in _rows(run.training_csv)]
    validations = list(_rows(run.validation_csv))
    goodput = read_goodput(run)
    if goodput is None or not validations or not curve:
        message = f"{run.root} has no goodput.json, or no row in training.csv or val.csv"
        raise ValueError(message)
    last = validations[-1]
    return RunRow(
        name=name,
        attention=config.model.attention,
        seed=config.seed,
        T=config.batch.seq_len,
        tokens_per_step=config.batch.tokens_per_step,
        steps=metrics["step"],
        tokens=metrics["tokens_seen"],
        num_parameters=metrics["num_parameters"],
        tokens_per_s=metrics["tokens_per_s"],
        mfu=metrics["mfu"],
        peak_mib=_peak_mib(run),
        wall_s=goodput.wall_s,
        goodput=goodput.goodput,
        buckets_s=goodput.buckets,
        learning_rate=config.optimizer.learning_rate,
        overrides=overrides,
        kernels=metrics["kernel_paths"],
        held_out_targets=int(last["tokens"]),
        bits_per_byte=float(last["bits_per_byte"]),
        loss_curve=curve,
        validation=[
            (int(r["step"]), float(r["val_loss"]), float(r["bits_per_byte"])) for r in validations
        ],
        data=data,
    )


def _rows(table: Path) -> Iterator[dict[str, str]]:
    if not table.exists():  # it begins with its first row
        return
    with table.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _peak_mib(run: RunDir) -> int | None:
    beats = read_records(run.heartbeat(), Heartbeat).records
    return max((beat.gpu_mem_peak for beat in beats if beat.gpu_mem_peak is not None), default=None)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    parser.add_argument("--recipe", default="tiny-cpu", help="recipe of all runs")
    add_repeatable(parser, "--set", "change a value", default=[], metavar="KEY=VALUE")
    add_repeatable(
        parser, "--vary", "train with this setting and without, instead of NSA and dense",
        default=[], metavar="KEY=VALUE",
    )  # fmt: skip
    parser.add_argument(
        "--root", type=Path, default=Path("compare"), metavar="DIR", help="folder for runs and data"
    )


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[RunRow]:
    """Stage the text once, train one after the other, and yield what each run says.

    Raises:
        ConfigError: If the configuration cannot be used, or the folder holds runs already.
        ValueError: If the text cannot be staged.
        RunFailedError: If a run does not finish.
    """
    del machine
    root = options.root.resolve()
    trials = plan_trials(options.recipe, options.set, options.vary)
    runs = [_free_run(root, index, one.name) for index, one in enumerate(trials)]
    config = trials[0].resolved.config
    tell(f"staging the text below {root / config.data.cache_dir}")
    try:
        data = read_data_facts(stage(config.data, root, config.seed))
    except DataError as error:
        message = f"{error.message}; {error.hint}"
        raise ValueError(message) from error
    for one, run in zip(trials, runs, strict=True):
        write_run(run, one.resolved)
        tell(f"training {run.run_id} to step {config.schedule.steps}; its log is {run.log}")
        train(run, one.resolved.config.runtime.allocator)
        yield read_run_row(run, one.name, data, tuple(map(without_folders, one.sets)))


def _free_run(root: Path, index: int, name: str) -> RunDir:
    """A setting is no name for a folder: its run has its number."""
    run = RunDir(root / "runs" / f"compare-{index if '=' in name else name}")
    if run.root.exists():
        message = f"{run.root} exists already; name another folder with --root, or remove it"
        raise ConfigError(message)
    return run


def write_run(run: RunDir, resolved: ResolvedConfig) -> None:
    """The run directory that the trainer is given."""
    run.root.mkdir(parents=True)
    write_manifest(
        run,
        RunManifest(
            run_id=run.run_id,
            config=resolved.config,
            origins=resolved.origins,
            config_sha256=resolved.sha256,
            created_unix_s=time.time(),
        ),
    )


def train(run: RunDir, allocator: str) -> None:
    """Run the trainer to its end.

    Raises:
        RunFailedError: If it ends with another code than that of a finished schedule.
    """
    done = subprocess.run(
        [sys.executable, "-m", "nsa_core.train", "--run-dir", str(run.root)],
        env=trainer_environment(allocator),
        stdout=subprocess.DEVNULL,  # the run's own log has it
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != TrainerExit.FINISHED:
        tail = (
            run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            if run.log.exists()
            else []
        )
        message = f"{run.run_id} ended with code {done.returncode}:\n" + "\n".join(tail)
        raise RunFailedError(message)


#: Loss and bits per byte are those of the last validation.
TABLE = Table(
    (
        Column("steps", 6, "steps"),
        Column("tokens", 11, "tokens", ","),
        Column("parameters", 11, "num_parameters", ","),
        Column("tokens/s", 9, "tokens_per_s", ",.0f"),
        Column("MFU", 7, "mfu", ".1%"),
        Column("peak MiB", 8, "peak_mib"),
        Column("wall s", 7, "wall_s", ".1f"),
        Column("goodput", 7, "goodput", ".1%"),
        Column("loss", 7, lambda row: row.validation[-1][1], ".4f"),
        Column("bits/byte", 9, "bits_per_byte", ".4f"),
        Column("run", 0, "name"),
    )
)


def find_excess(rows: Sequence[Any]) -> str | None:
    """Why the comparison failed: one is clearly worse, or the held-out text was not held out.

    NSA is judged beside dense, and a setting beside the base.
    """
    found = {row.name: row for row in rows}
    if any(row.data.shared_documents for row in rows):
        return "documents of the validation split are in the training split as well"
    control = found.pop(BASE, None) or found.pop("dense", None)
    if control is None:
        return None
    excess = {name: row.bits_per_byte - control.bits_per_byte for name, row in found.items()}
    worse = [name for name, bits in excess.items() if not bits <= MAX_EXCESS_BITS_PER_BYTE]
    if not worse:
        return None
    said = ", ".join(f"{name} {excess[name]:+.4f}" for name in worse)
    return (
        f"bits per byte on held-out documents against {control.name}: {said}; at most "
        f"{MAX_EXCESS_BITS_PER_BYTE:+.2f} is allowed"
    )


BENCH = Bench(
    summary="NSA and the dense control, or settings, trained on the same text to the same step",
    needs_card=False,
    add_flags=add_flags,
    measure=measure,
    header=TABLE.header,
    format_row=TABLE.line,
    failure=find_excess,
)
