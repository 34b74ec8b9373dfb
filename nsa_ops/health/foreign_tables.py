"""Logs that are tables: a JSON object of series, or CSV with a header such as training.csv."""

import csv
import io
import json
from math import isfinite
from typing import Any

from nsa_ops.health.foreign_lines import LineFigures, printed_unit
from nsa_ops.health.foreign_reader import ForeignLog, LogReader, facts_of_log, without_unreported


def parse_series(text: str) -> ForeignLog | None:
    """A JSON object of series, `{"lm loss": {"values": {"1": 12.9}}}`; "nan" means no data."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except ValueError:
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
        if isinstance(loss, (int, float)):
            step_s = times.get(step)
            reader.progress(
                LineFigures(
                    step=int(step),
                    loss=float(loss),
                    step_s=float(step_s) if isinstance(step_s, (int, float)) else None,
                )
            )
    return ForeignLog(reader.beats, facts_of_log(reader))


#: Columns of training.csv, and of tables like it, by the figure that they hold.
_COLUMNS = {
    "step": "step", "iter": "step", "iteration": "step", "loss": "loss", "train_loss": "loss",
    "val_loss": "evaluation_loss", "lr": "lr", "learning_rate": "lr", "grad_norm": "grad_norm",
    "tokens_per_s": "rate", "step_s": "step_s", "data_s": "data_s",
}  # fmt: skip


def parse_table(text: str) -> ForeignLog | None:
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
    told: dict[str, Any] = {name: value for name, (value, _) in figures.items()}
    told |= {
        f"{name}_unit": figures[name][1] for name in ("loss", "lr", "grad_norm") if name in figures
    }
    record = LineFigures(step=int(step[0]), **told)
    reader.progress(record, val_loss=record.evaluation_loss)


def _cell(text: str) -> tuple[float, float] | None:
    """A number and the unit of its last place; None for an empty cell or a word."""
    try:
        return float(text), printed_unit(text)
    except ValueError:
        return None
