"""Which lines a bench result is drawn as; pure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeGuard

from nsa_core.rundir.bench_result import BenchResult

#: Tokens of a training curve, from one drawn point to the next.
_FACTOR_OF_A_POINT = 1.6
#: Of a line's name that the right margin holds.
_LABEL_LETTERS = 16

Row = dict[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class PlotLine:
    """One line of a panel: its label, its (tokens, value) points, ascending, and its CSS class."""

    label: str
    points: tuple[Point, ...]
    css: str


@dataclass(frozen=True)
class Panel:
    """One pair of logarithmic axes; the first line is at the back."""

    title: str
    unit: str
    x_label: str
    lines: tuple[PlotLine, ...]


@dataclass(frozen=True)
class Panels:
    """A whole picture, and on what it was measured; two panels in a row."""

    title: str
    remark: str
    panels: tuple[Panel, ...]


def panels_of(result: BenchResult) -> Panels:
    """The picture of a result; empty where its rows hold nothing that can be drawn."""
    panels = _PANELS.get(result.bench, no_panels)(result)
    return Panels(
        _title_of(result), remark_of(result), tuple(panel for panel in panels if panel.lines)
    )


def _title_of(result: BenchResult) -> str:
    if result.bench == "compare" and any(row.get("name") == "base" for row in result.rows):
        return "One recipe, with settings and without, trained on the same text"
    return _TITLES.get(result.bench, result.bench)


def no_panels(result: BenchResult) -> list[Panel]:
    """A bench that is not drawn."""
    del result
    return []


def kernel_panels(result: BenchResult) -> list[Panel]:
    """Forward, and forward with backward, of every shape: ms against the tokens of a document."""
    panels, rows = [], result.rows
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


def compare_panels(result: BenchResult) -> list[Panel]:
    """Loss in training, and bits per byte on held-out documents, against the tokens seen."""
    losses, bits, colours = [], [], cycle(("s1", "s3", "s4", "s5"))
    for row in sorted(result.rows, key=_is_control, reverse=True):
        label, css = _short_name(row), "s2" if _is_control(row) else next(colours)
        curve = [(float(tokens), float(loss)) for _, tokens, loss in row["loss_curve"]]
        losses.append(PlotLine(label, tuple(_averaged(_drawable(curve))), css))
        held_out = [
            (float(step * row["tokens_per_step"]), float(found))
            for step, _, found in row["validation"]
        ]
        bits.append(PlotLine(label, _drawable(held_out), css))
    x_label = "tokens seen"
    return [
        Panel("Training loss", "nats", x_label, tuple(line for line in losses if line.points)),
        Panel(
            "Held-out documents", "bits per byte", x_label,
            tuple(line for line in bits if len(line.points) > 1),
        ),
    ]  # fmt: skip


def _name_of(row: Row) -> str:
    """Of a run of `compare`; rows of before settings could be varied have their attention alone."""
    name = row.get("name", row["attention"])
    if not isinstance(name, str):
        message = f"the name of a run must be text, got {type(name).__name__}"
        raise TypeError(message)
    return name


def _short_name(row: Row) -> str:
    """What fits beside a line: a setting without its section."""
    name = _name_of(row)
    if name == "nsa":
        return "NSA"
    key, equals, value = name.partition("=")
    short = key.rpartition(".")[2] + equals + value
    return short if len(short) <= _LABEL_LETTERS else short[: _LABEL_LETTERS - 1] + "…"


def _is_control(row: Row) -> bool:
    """What the others are judged beside."""
    return _name_of(row) in ("dense", "base")


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


def model_panels(result: BenchResult) -> list[Panel]:
    """Milliseconds of a whole step, NSA and dense, each with the floor of its own arithmetic."""
    lines = []
    for attention, name, css in (("dense", "dense", "s2"), ("nsa", "NSA", "s1")):
        own = [row for row in result.rows if row.get("attention") == attention]
        lines.append(
            _line(f"floor, {name}", own, [_step_floor_ms(r, result) for r in own], "floor")
        )
        lines.append(_line(name, own, [row.get("step_ms") for row in own], css))
    return [_panel("Whole step", "ms", lines, "tokens of a row")]


def _step_floor_ms(row: Row, result: BenchResult) -> float | None:
    if result.matmul_tflops is None:
        return None
    flops: float = row["train_flops_per_token"] * row["tokens"]
    return flops / (result.matmul_tflops * 1e9)


def decode_panels(result: BenchResult) -> list[Panel]:
    """One token over full caches, by shape and sequences: ms against the tokens of a cache."""
    panels = []
    for shape, batch in dict.fromkeys((row.get("shape"), row.get("batch")) for row in result.rows):
        own = [row for row in result.rows if (row.get("shape"), row.get("batch")) == (shape, batch)]
        lines = [
            _line(name, own, [row.get(key) for row in own], css)
            for name, key, css in (
                ("bytes floor", "floor_ms", "floor"),
                ("dense, flash", "dense_flash_ms", "s2 thin"),
                ("dense, cuDNN", "dense_cudnn_ms", "s2"),
                ("NSA", "nsa_ms", "s1"),
            )
        ]
        title = f"Shape {shape}, {batch} sequence{'' if batch == 1 else 's'}"
        panels.append(_panel(title, "ms", lines, "tokens of a cache"))
    return panels


def scale_panels(result: BenchResult) -> list[Panel]:
    """Tokens a second of one rank, alone and among several, against the tokens of a row."""
    lines, rows = [], result.rows
    kinds = dict.fromkeys((row["recipe"], row["ranks"], row["sharding"]) for row in rows)
    for number, (recipe, ranks, sharding) in enumerate(kinds):
        own = [
            r for r in rows if (r["recipe"], r["ranks"], r["sharding"]) == (recipe, ranks, sharding)
        ]
        label = "1 rank" if ranks == 1 else f"{ranks} ranks, {sharding}"
        rates = [row["tokens_per_s"] and row["tokens_per_s"] / ranks for row in own]
        lines.append(_line(label, own, rates, f"s{number % 5 + 1}"))
    return [_panel("Whole step, of one rank", "tokens/s", lines, "tokens of a row")]


def validation_panels(result: BenchResult) -> list[Panel]:
    """Tokens a second of every path against the tokens of a row."""
    lines, rows = [], result.rows
    for number, path in enumerate(_distinct(rows, "path")):
        own = [row for row in rows if row.get("path") == path]
        lines.append(
            _line(path, own, [row.get("tokens_per_s") for row in own], f"s{number % 5 + 1}")
        )
    return [_panel("Whole step", "tokens/s", lines, "tokens of a row")]


_BRANCHES = (
    ("compressed", "compressed", "s3 thin"),
    ("selected", "selected", "s4 thin"),
    ("sliding", "window", "s5 thin"),
)


def _branch_ms(row: Row, branch: str, index: int) -> object:
    times = row.get("branches_ms", {}).get(branch)
    return times[index] if times else None


def _panel(
    title: str, unit: str, lines: Sequence[PlotLine], x_label: str = "tokens of a document"
) -> Panel:
    return Panel(title, unit, x_label, tuple(line for line in lines if line.points))


def _line(label: str, rows: Sequence[Row], values: Sequence[object], css: str) -> PlotLine:
    """A line through the rows that have a positive value; logarithms know no other."""
    found = zip((row.get("T") for row in rows), values, strict=True)
    points = [(float(x), float(y)) for x, y in found if _is_positive(x) and _is_positive(y)]
    return PlotLine(label, tuple(sorted(points)), css)


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
    "scale": "Training steps on one rank and on several",
    "validate": "Training steps by length and selection path",
}
_PANELS: Mapping[str, Callable[[BenchResult], list[Panel]]] = {
    "kernels": kernel_panels,
    "compare": compare_panels,
    "model": model_panels,
    "decode": decode_panels,
    "scale": scale_panels,
    "validate": validation_panels,
}
