"""Logs of other trainers as heartbeats, so that the same judge can be tried on them.

`parse_log(text)` is pure. What a log does not hold is left out; where it has the time of a step
but no rate, the rate is in steps a second, which serves as well for the run's own median.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import Any

from nsa_core.rundir.bounded_json import JsonError, parse_json
from nsa_ops.health.foreign_endings import ending_of
from nsa_ops.health.foreign_lines import (
    LineFigures,
    clean,
    find_step,
    parse_line,
    printed_unit,
)
from nsa_ops.health.foreign_reader import ForeignLog, LogReader, facts_of_log, without_unreported

#: Longer lines hold no figures of a step, and patterns must not wander through them.
_MOST_LINE = 20_000

_MULTILINE = re.compile(r"\[step=[\d,]+/")
_CONTINUED = re.compile(r"^\s+[\w/().\- ]+=\S")
_OVERFLOW = re.compile(r"\bOVERFLOW!|overflow detected, setting loss scale to", re.IGNORECASE)
_PLAIN = r"(\d{1,40}(?:\.\d{0,40})?(?:e[-+]?\d{1,3})?)"
_NEW_SCALE = re.compile(rf"(?:reducing to|loss scale to:?)\s*{_PLAIN}", re.IGNORECASE)
_ROUTER = re.compile(r"layer:?\s*(\d+).*?topk_idx:?\s*\[([\d,\s]+)\]")
_READ_TIME = re.compile(rf"read batch time\s*:\s*'?,?\s*{_PLAIN}")
_LOAD = re.compile(
    r"(?:layer:?\s*(\d+).*?)?(?:tokens[ _]per[ _]expert|expert[ _](?:load|counts?|usage|tokens))"
    r"\W*\[([\d.,\s]+)\]",
    re.IGNORECASE,
)
_COLLECTIVE = re.compile(r"collective operation timeout.*ran for (\d+) mil")
_NUMBERS = re.compile(r"\d+")
_STEP = re.compile(r"[0-9]{1,18}")
_WORDS = re.compile(r"[^\W\d]+(?:[-_./][^\W\d]+)*")
_RESUMED = re.compile(r"\bresum(?:ing|ed)\b|loading checkpoint from", re.IGNORECASE)
#: Columns of training.csv, and of tables like it, by the figure that they hold.
_COLUMNS = {
    "step": "step", "iter": "step", "iteration": "step", "loss": "loss", "train_loss": "loss",
    "val_loss": "evaluation_loss", "lr": "lr", "learning_rate": "lr", "grad_norm": "grad_norm",
    "tokens_per_s": "rate", "step_s": "step_s", "data_s": "data_s",
}  # fmt: skip


def parse_log(text: str) -> ForeignLog:
    """Read a log of any known kind; what is not understood is passed over.

    It may be lines, a JSON object of series, or a table with a header, as our own training.csv is.
    A log without a training loss is read again for its evaluations, and one without those for the
    rates of its progress bars.
    """
    series = _parse_series(text) or _parse_table(text)
    if series is not None:
        return series
    first = _read(text, "")
    for also in ("evaluations", "bars"):
        if not first.beats and (again := _read(text, also)).beats:
            first = again
    beats = without_unreported(first.beats)
    num_unread = max(first.unread.values(), default=0)
    return ForeignLog(beats, facts_of_log(first), first.error, first.ending, num_unread)


def _read(text: str, also: str) -> LogReader:
    reader = LogReader(also=also)
    for lines in _records(text):
        _take(reader, lines)
    return reader


def _records(text: str) -> Iterator[list[str]]:
    """Lines, and the lines of one record together where it has several."""
    pending: list[str] = []
    for raw in re.split(r"[\r\n]+", text):
        line = clean(raw[:_MOST_LINE])
        if pending and _CONTINUED.match(line):
            pending.append(line)
            continue
        if pending:
            yield pending
        pending = [line] if _MULTILINE.search(line) else []
        if not pending:
            yield [line]
    if pending:
        yield pending


def _take(reader: LogReader, lines: list[str]) -> None:
    line = lines[0]
    if found := _COLLECTIVE.search(line):
        reader.collective_timeout(int(found[1]) / 1000)
        if not reader.ending:
            reader.end("crashed", line)
    elif found := _ROUTER.search(line):
        chosen = Counter(found[2].replace(" ", "").split(","))
        reader.router(found[1], [float(count) for count in chosen.values()])
    elif found := _LOAD.search(line):
        reader.router(found[1], [float(word) for word in re.findall(r"\d+\.?\d*", found[2])])
    elif found := _READ_TIME.search(line):
        reader.read_s = float(found[1])
    elif _OVERFLOW.search(line):
        scale = _NEW_SCALE.search(line)
        reader.overflow(float(scale[1]) if scale else None)
    else:
        _take_figures(reader, lines)


def _take_figures(reader: LogReader, lines: list[str]) -> None:
    # A record may be written over several lines.
    figures = parse_line(lines[0] if len(lines) == 1 else " ".join(map(str.strip, lines)))
    is_bar = "%|" in lines[0]
    if figures.is_record:
        reader.progress(figures, val_loss=figures.evaluation_loss)
    elif reader.also == "evaluations" and figures.evaluation_loss is not None:
        is_only = figures.loss is None  # else the line has both losses
        loss = figures.evaluation_loss if is_only else figures.loss
        validation = None if is_only else figures.evaluation_loss
        reader.progress(replace(figures, loss=loss), val_loss=validation)
    elif reader.also == "bars" and is_bar and (figures.rate or figures.step_s):
        reader.progress(figures)
    elif is_bar:
        step, total = find_step(lines[0])
        reader.bar_step, reader.total_steps = step, total or reader.total_steps
    elif _RESUMED.search(lines[0]):
        reader.resumed = True
    elif figures.evaluation_loss is not None and reader.beats:
        reader.beat(msg="eval", phase="eval", val_loss=figures.evaluation_loss)
    elif not _take_end(reader, lines[0]) and not figures.is_evaluation:
        shape = _NUMBERS.sub("#", _WORDS.sub("a", lines[0].strip()))
        reader.unread[shape] += shape.count("#") > 1


def _take_end(reader: LogReader, line: str) -> bool:
    """Whether a line says how the run ended; what names its cause goes before what follows it."""
    ending = ending_of(line)
    if ending == "out_of_memory":
        if reader.ending != "out_of_memory":
            reader.end("out_of_memory", line)
    elif ending == "stopped":
        if reader.ending != "out_of_memory":
            reader.end("stopped", line)
    elif ending and not reader.ending:
        reader.end("stopped" if ending == "maybe_stopped" else "crashed", line)
    return bool(ending)


def _parse_series(text: str) -> ForeignLog | None:
    """A JSON object of series, `{"lm loss": {"values": {"1": 12.9}}}`; "nan" means no data."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = parse_json(text.encode(errors="replace"), is_nan_allowed=True)
    except JsonError:
        return None
    if not isinstance(document, dict):
        return None
    series = {
        name: values
        for name, content in document.items()
        if isinstance(content, dict) and isinstance(values := content.get("values"), dict)
    }
    losses = next((values for name, values in series.items() if "loss" in name.lower()), None)
    if losses is None:
        return None
    times = series.get("iteration-time", {})
    reader = LogReader()
    for step, loss in losses.items():
        if isinstance(loss, (int, float)) and _STEP.fullmatch(step):
            step_s = times.get(step)
            reader.progress(
                LineFigures(
                    step=int(step),
                    loss=float(loss),
                    step_s=float(step_s) if isinstance(step_s, (int, float)) else None,
                )
            )
    return ForeignLog(reader.beats, facts_of_log(reader))


def _parse_table(text: str) -> ForeignLog | None:
    """A CSV table whose header names a step and a loss; a cell that is no number is left out."""
    rows = csv.reader(io.StringIO(text))
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        names = [_COLUMNS.get(name) for name in header]
        if len(header) < 2 or "step" not in names or "loss" not in names:
            return None
        reader = LogReader()
        for row in rows:
            _take_row(reader, dict(zip(names, row, strict=False)))
    except csv.Error:
        return None
    return ForeignLog(without_unreported(reader.beats), facts_of_log(reader))


def _take_row(reader: LogReader, cells: dict[str | None, str]) -> None:
    figures = {name: value for name, cell in cells.items() if name and (value := _cell(cell))}
    step = figures.pop("step", None)
    if step is None or not isfinite(step[0]):
        return
    values: dict[str, Any] = {name: value for name, (value, _) in figures.items()}
    values |= {
        f"{name}_unit": figures[name][1] for name in ("loss", "lr", "grad_norm") if name in figures
    }
    record = LineFigures(step=int(step[0]), **values)
    reader.progress(record, val_loss=record.evaluation_loss)


def _cell(text: str) -> tuple[float, float] | None:
    """A number and the unit of its last place; None for an empty cell or a word."""
    try:
        return float(text), printed_unit(text)
    except ValueError:
        return None
