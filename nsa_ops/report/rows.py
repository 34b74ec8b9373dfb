"""Read the CSV files of a run by header name, and join attempts: the last attempt wins."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_core.rundir.bounded_json import JsonError, read_bounded

#: A line a step of 200 bytes, for more steps than a run has.
MAX_CSV_BYTES = 256 * 2**20
#: Steps and attempts beyond this are no counts: a float does not hold them exactly.
_MAX_COUNT = 2**53


@dataclass(frozen=True)
class Row:
    """One logged step: the numbers that its line held, by column name.

    Attributes:
        attempt: Attempt that logged it.
        step: Optimizer step.
        values: Every other column that is a number; NaN and infinity are kept as they are.
    """

    attempt: int
    step: int
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The rows that make up the run's history.

    Attributes:
        rows: One row a step, in order of steps.
        replaced: Rows of earlier attempts that a later attempt did again or rolled back.
        torn: Lines that are no row: cut off by a kill or a full disk.
    """

    rows: list[Row]
    replaced: int = 0
    torn: int = 0

    def column(self, name: str) -> list[tuple[float, float]]:
        """Points (step, value) of one column, where it has a number."""
        return [(row.step, row.values[name]) for row in self.rows if name in row.values]


def read_rows(path: Path) -> Rows | None:
    """The history in a CSV file with a header; None if there is no such file.

    A file that is longer than any run's is one torn line.
    """
    if not path.is_file():
        return None
    try:
        text = read_bounded(path, MAX_CSV_BYTES).decode(errors="replace")
    except JsonError:
        return Rows([], torn=1)
    lines = parse_lines(text)
    if lines and not text.endswith("\n"):
        lines[-1] = {}
    rows: list[Row] = []
    for line in lines:
        row = _parse_row(line, rows[-1] if rows else None)
        if row is not None:
            rows.append(row)
    joined = join_attempts(rows)
    return Rows(joined, replaced=len(rows) - len(joined), torn=len(lines) - len(rows))


def parse_lines(text: str) -> list[dict[str, str]]:
    """Cells by column of each line below the header; empty for a line that is none of this table.

    A line that no CSV reader takes costs only itself.
    """
    reader = csv.reader(text.splitlines())
    header: list[str] | None = None
    lines: list[dict[str, str]] = []
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return lines
        except csv.Error:
            cells = [""]
        if header is None:
            header = cells
        elif cells:
            lines.append(dict(zip(header, cells, strict=True)) if len(cells) == len(header) else {})


def join_attempts(rows: Sequence[Row]) -> list[Row]:
    """One row a step: an attempt that begins at step s replaces all earlier rows from s on."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return kept


def _parse_row(line: dict[str, str], previous: Row | None) -> Row | None:
    """A row, or None for a torn line or a repeated header.

    A file without an `attempt` column begins another attempt wherever the step goes back.
    """
    numbers = {
        name.strip(): number
        for name, text in line.items()
        if (number := _parse_number(text)) is not None
    }
    step = numbers.pop("step", math.nan)
    if not abs(step) <= _MAX_COUNT:
        return None
    attempt = numbers.pop("attempt", math.nan)
    if not abs(attempt) <= _MAX_COUNT:
        attempt = _guess_attempt(step, previous)
    return Row(int(attempt), int(step), numbers)


def _guess_attempt(step: float, previous: Row | None) -> int:
    if previous is None:
        return 1
    return previous.attempt + (1 if step <= previous.step else 0)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
