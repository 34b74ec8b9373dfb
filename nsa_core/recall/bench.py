"""Learned recall: an NSA model and a dense one after the same lessons, and what the first loses.

Recipes and reasons: docs/learned-recall.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nsa_core.bench.command import Bench, Column, Table
from nsa_core.config.training import RuntimeConfig
from nsa_core.evaluate.device import COMPUTE_DTYPE, choose_device
from nsa_core.kernels.dispatch import choose_backends, device_facts
from nsa_core.recall.learning import (
    Lesson,
    Progress,
    RecallFigures,
    RecallRecipe,
    as_dense,
    judge_recall,
    learn_recall,
)
from nsa_core.recall.recipes import on_card, on_cpu, precision_on
from nsa_core.recall.task import RecallTask
from nsa_core.rundir.bench_result import Machine
from nsa_core.terminal import tell

#: Bars of the specification (what must be shown, 9).
LEAST_ACCURACY, MOST_WITHOUT_SELECTION = 0.95, 0.5
#: Questions that every figure counts, at least.
LEAST_QUERIES = 1000


@dataclass(frozen=True)
class RecallRow:
    """One model on one kind of rows, after its lessons.

    Attributes:
        accuracy: Share of right answers on fresh rows.
        without_selection: The same with the gate of the selected branch at 0; None if dense.
        without_choice: The same with the always selected blocks only; None if dense.
        steps: Of training.
        train_s: Seconds that they took.
        backend: Of the selected branch, or of dense attention.
    """

    attention: str
    seed: int
    seq_len: int
    accuracy: float
    without_selection: float | None
    without_choice: float | None
    chance: float
    num_queries: int
    steps: int
    train_s: float
    backend: str


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[RecallRow]:
    """Teach and judge the NSA model and the dense one, seed by seed.

    Raises:
        ValueError: If there is no such device, or a seed cannot be used.
    """
    del machine
    device = choose_device(options.device)
    make_recipe = on_card if device.type == "cuda" else on_cpu
    for recipe in [make_recipe(seed) for seed in options.seeds]:  # all, before one is learned
        yield from teach_and_judge(recipe, device)
        yield from teach_and_judge(as_dense(recipe), device)


def teach_and_judge(recipe: RecallRecipe, device: torch.device) -> Iterator[RecallRow]:
    """Rows of one model: one for each length that it is judged by."""
    precision = precision_on(device)
    facts = device_facts(device, COMPUTE_DTYPE[precision])
    attention = recipe.model.attention
    backends = choose_backends(RuntimeConfig(), facts, attention)
    lesson = learn_recall(
        recipe, device, backends=backends, precision=precision, on_progress=_tell_progress
    )
    for task in recipe.judged:
        rows = -(-LEAST_QUERIES // task.num_queries)
        found = judge_recall(lesson.model, task, rows=rows, batch=4, precision=precision)
        yield _row(recipe, lesson, task, found, backends.choices[0].name)


def _row(
    recipe: RecallRecipe, lesson: Lesson, task: RecallTask, found: RecallFigures, backend: str
) -> RecallRow:
    last = lesson.history[-1]
    return RecallRow(
        attention=recipe.model.attention,
        seed=recipe.seed,
        seq_len=found.seq_len,
        accuracy=found.accuracy,
        without_selection=found.without_selection,
        without_choice=found.without_choice,
        chance=1 / task.num_values,
        num_queries=found.num_queries,
        steps=last.step,
        train_s=last.seconds,
        backend=backend,
    )


def judge(rows: Sequence[Any]) -> str | None:
    """The first NSA row that misses a bar of the specification, as a sentence; pure."""
    for row in rows:
        name = f"{row.attention}, seed {row.seed}, {row.seq_len} tokens"
        if row.without_selection is None:
            continue
        if row.accuracy < LEAST_ACCURACY:
            right = f"{100 * row.accuracy:.1f} % of the answers are right"
            return f"{name}: {right}, and {_LEAST} are needed"
        if row.without_selection > MOST_WITHOUT_SELECTION:
            return (
                f"{name}: {100 * row.without_selection:.1f} % are right without the selected "
                f"branch, and {100 * MOST_WITHOUT_SELECTION:.0f} % is the limit"
            )
    return None


_LEAST = f"{100 * LEAST_ACCURACY:.0f} %"
TABLE = Table(
    (
        Column("model", 5, "attention"),
        Column("seed", 5, "seed"),
        Column("tokens", 7, "seq_len", ","),
        Column("right", 7, "accuracy", ".1%"),
        Column("no selection", 13, "without_selection", ".1%"),
        Column("forced blocks only", 19, "without_choice", ".1%"),
        Column("chance", 7, "chance", ".1%"),
        Column("answers", 8, "num_queries", ","),
        Column("steps", 6, "steps", ","),
        Column("train s", 8, "train_s", ".1f"),
        Column("backend", 0, "backend"),
    )
)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")


def _tell_progress(progress: Progress) -> None:
    tell(
        f"lesson {progress.stage + 1}, {progress.seq_len:,} tokens, step {progress.step}: "
        f"loss {progress.loss:.3f}, {100 * progress.accuracy:.1f} % right, {progress.seconds:.0f} s"
    )


BENCH = Bench(
    summary="teach NSA and dense attention to recall, and cut the selected branch",
    needs_card=False,
    add_flags=_add_flags,
    measure=measure,
    header=TABLE.header,
    format_row=TABLE.line,
    failure=judge,
)
