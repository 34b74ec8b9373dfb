"""The performance-validation matrix as a bench: lengths by paths, judged by the losses."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from nsa_core.bench.command import Bench
from nsa_core.bench.paths import PATHS
from nsa_core.bench.validation import (
    LENGTHS,
    STEPS,
    ValidationRequest,
    ValidationRow,
    final_loss_limit,
    measure_cells,
)
from nsa_core.checks.__main__ import read_config
from nsa_core.rundir.bench_result import Machine
from nsa_core.train.failure import TrainerError


def failure(rows: Sequence[ValidationRow]) -> str | None:
    """The first cell whose losses are not those of the first path; None if all agree."""
    for row in rows:
        for name, gap, limit in (
            ("first", row.first_loss_gap, row.first_loss_limit),
            ("final", row.final_loss_gap, final_loss_limit(row.tokens)),
        ):
            if gap is not None and not gap <= limit:  # NaN is no agreement
                return (
                    f"{row.path} at {row.T} tokens: its {name} loss is {gap:.2g} nats from that of "
                    f"the first path, and {limit:.2g} are allowed"
                )
    return None


HEADER = (
    f"{'path':>14} {'T':>6} {'tokens/s':>9} {'spread':>6} {'GiB':>6} {'loss first':>10} "
    f"{'final':>8} {'gap first':>9} {'gap final':>9}  outcome"
)


def format_row(row: ValidationRow) -> str:
    """One line of the table."""
    cells = [
        _cell(row.tokens_per_s, ",.0f", 9), _cell(row.spread, ".1%", 6),
        _cell(row.peak_gib, ".2f", 6),
        _cell(row.first_loss, ".4f", 10), _cell(row.final_loss, ".4f", 8),
        _cell(row.first_loss_gap, ".1e", 9), _cell(row.final_loss_gap, ".1e", 9),
    ]  # fmt: skip
    return f"{row.path:>14} {row.T:>6} {' '.join(cells)}  {row.outcome}"


def _cell(value: float | None, form: str, width: int) -> str:
    return f"{'n/a' if value is None else format(value, form):>{width}}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="RunConfig as JSON, `-` for stdin; a recipe without it")
    add("--length", action="append", type=int, metavar="T", help="tokens of a row; repeatable")
    add("--steps", type=int, default=STEPS, metavar="N", help="optimizer steps of a cell")
    add("--path", action="append", metavar="NAME", help=f"repeatable: {', '.join(PATHS)}")
    add("--root", type=Path, default=Path(), metavar="DIR", help="a relative cache lies below it")


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[ValidationRow]:
    """Run what the flags ask for.

    Raises:
        ValueError: If they cannot be used.
    """
    del machine
    request = ValidationRequest(
        config=read_config(options.config, "cuda" if torch.cuda.is_available() else "cpu"),
        lengths=tuple(options.length or LENGTHS),
        steps=options.steps,
        paths=tuple(options.path or ()),
        root=options.root.absolute(),
    )
    try:
        yield from measure_cells(request)
    except TrainerError as error:
        message = f"{error}; {error.hint}"
        raise ValueError(message) from error


BENCH = Bench(
    summary="Train a few steps at several lengths on every path of the selected branch.",
    needs_card=False,
    add_flags=add_flags,
    measure=measure,
    header=HEADER,
    format_row=format_row,
    failure=failure,
)
