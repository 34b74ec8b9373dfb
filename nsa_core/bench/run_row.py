"""What a finished run directory says, as one row of a comparison."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.data.shards import read_hashes
from nsa_core.data.staging import StagedData
from nsa_core.rundir.goodput import read_goodput
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.jsonl import read_records
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest


@dataclass(frozen=True)
class DataFacts:
    """The text that both runs saw, and the text that neither did.

    Attributes:
        manifest_sha256: Names exactly these tokens.
        tokenizer: Kind of tokenizer.
        vocab_size: Its ids.
        train_documents: Documents of the training split.
        train_tokens: Their tokens.
        train_bytes: Their bytes of text.
        held_out_documents: Documents of the validation split.
        held_out_tokens: Their tokens.
        held_out_bytes: Their bytes of text.
        shared_documents: Documents of equal content in both splits; 0, or nothing is held out.
    """

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


def read_run_row(run: RunDir, data: DataFacts, overrides: tuple[str, ...]) -> RunRow:
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
        attention=config.model.attention,
        seed=config.seed,
        T=config.batch.seq_len,
        tokens_per_step=config.batch.tokens_per_step(),
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
