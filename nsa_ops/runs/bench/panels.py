"""Which lines a bench result is drawn as; pure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from nsa_core.rundir.bench_result import BenchResult

#: Tokens of a training curve, from one drawn point to the next.
_FACTOR_OF_A_POINT = 1.6

Row = dict[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        label: What it is; written at its end.
        points: (tokens, value), ascending.
        css: Class that colours it.
    """

    label: str
    points: tuple[Point, ...]
    css: str


@dataclass(frozen=True)
class Panel:
    """One pair of logarithmic axes.

    Attributes:
        title: What is measured.
        unit: Unit of the vertical axis.
        x_label: What the horizontal axis counts.
        lines: What is drawn, the first one at the back.
    """

    title: str
    unit: str
    x_label: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Panels:
    """A whole picture.

    Attributes:
        title: What it shows.
        remark: What it was measured on and with.
        panels: Two in a row, from left to right.
    """

    title: str
    remark: str
    panels: tuple[Panel, ...]


def panels_of(result: BenchResult) -> Panels:
    """The picture of a result; empty where its rows hold nothing that can be drawn."""
    panels = _PANELS.get(result.bench, no_panels)(result.rows)
    title = _TITLES.get(result.bench, result.bench)
    return Panels(title, remark_of(result), tuple(panel for panel in panels if panel.lines))


def no_panels(rows: Sequence[Row]) -> list[Panel]:
    """A bench that is not drawn."""
    del rows
    return []


def kernel_panels(rows: Sequence[Row]) -> list[Panel]:
    """Forward, and forward with backward, of every shape: ms against the tokens of a document."""
    panels = []
    for shape in _distinct(rows, "shape"):
        own = [row for row in rows if row.get("shape") == shape]
        for suffix, index, words in (("fwd", 0, "forward"), ("fwd_bwd", 1, "forward + backward")):
            lines = [
                _line(name, own, [_branch_ms(row, branch, index) for row in own], css)
                for branch, name, css in _BRANCHES
            ]
            lines += [
                _line(name, own, [row.get(key) for row in own], css)
                for name, key, css in (
                    ("arithmetic floor", f"floor_{suffix}_ms", "floor"),
                    ("dense, flash", f"dense_flash_{suffix}_ms", "s2 thin"),
                    ("dense, cuDNN", f"dense_cudnn_{suffix}_ms", "s2"),
                    ("NSA", f"{suffix}_ms", "s1"),
                )
            ]
            panels.append(_panel(f"Shape {shape}, {words}", "ms", lines))
    return panels


def compare_panels(rows: Sequence[Row]) -> list[Panel]:
    """Loss in training, and bits per byte on held-out documents, against the tokens seen."""
    losses, bits = [], []
    for attention, name, css in (("dense", "dense", "s2"), ("nsa", "NSA", "s1")):
        for row in (row for row in rows if row.get("attention") == attention):
            curve = [(float(tokens), float(loss)) for _, tokens, loss in row["loss_curve"]]
            losses.append(Line(name, tuple(_averaged(_drawable(curve))), css))
            held_out = [
                (float(step * row["tokens_per_step"]), float(found))
                for step, _, found in row["validation"]
            ]
            bits.append(Line(name, _drawable(held_out), css))
    x_label = "tokens seen"
    return [
        Panel("Training loss", "nats", x_label, tuple(line for line in losses if line.points)),
        Panel(
            "Held-out documents", "bits per byte", x_label,
            tuple(line for line in bits if len(line.points) > 1),
        ),
    ]  # fmt: skip


def _averaged(points: Sequence[Point]) -> Iterator[Point]:
    """One point for every factor of 1.6 in x: the last x, and the mean of y; x ascends."""
    group: list[Point] = []
    for number, point in enumerate(points):
        group.append(point)
        is_last = number + 1 == len(points)
        if is_last or points[number + 1][0] >= _FACTOR_OF_A_POINT * group[0][0]:
            yield point[0], sum(y for _, y in group) / len(group)
            group = []


def _drawable(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(sorted((x, y) for x, y in points if _is_positive(x) and _is_positive(y)))


_BRANCHES = (
    ("compressed", "compressed", "s3 thin"),
    ("selected", "selected", "s4 thin"),
    ("sliding", "window", "s5 thin"),
)


def _branch_ms(row: Row, branch: str, index: int) -> object:
    times = row.get("branches_ms", {}).get(branch)
    return times[index] if times else None


def _panel(title: str, unit: str, lines: Sequence[Line]) -> Panel:
    drawn = tuple(line for line in lines if line.points)
    return Panel(title, unit, "tokens of a document", drawn)


def _line(label: str, rows: Sequence[Row], values: Sequence[object], css: str) -> Line:
    """A line through the rows that have a positive value; logarithms know no other."""
    found = zip((row.get("T") for row in rows), values, strict=True)
    points = [(float(x), float(y)) for x, y in found if _is_positive(x) and _is_positive(y)]
    return Line(label, tuple(sorted(points)), css)


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


def _distinct(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if key in row))


def remark_of(result: BenchResult) -> str:
    """Card, clock, versions, commit: without them a speed says nothing."""
    parts = [result.card]
    if result.clock_mhz is not None:
        parts.append(f"{result.clock_mhz:g} MHz")
    if result.driver:
        parts.append(f"driver {result.driver}")
    parts.append(f"torch {result.torch}")
    if result.triton:
        parts.append(f"Triton {result.triton}")
    if result.matmul_tflops is not None:
        parts.append(f"bf16 product {result.matmul_tflops:g} TFLOP/s")
    return ", ".join([*parts, f"commit {result.commit[:12]}"])


_TITLES = {
    "kernels": "One attention layer: NSA and dense attention",
    "model": "Whole training steps: NSA and dense attention",
    "compare": "NSA and dense trained on the same text",
    "decode": "One decoded token: NSA and dense attention",
    "validate": "Training steps by length and selection path",
}
_PANELS: Mapping[str, Callable[[Sequence[Row]], list[Panel]]] = {
    "kernels": kernel_panels,
    "compare": compare_panels,
}
