"""training.csv and val.csv: whole rows only, each step once, also after a kill and a resume."""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.atomic import write_text

TRAINING_COLUMNS = (
    "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "data_s",
    "skipped", "attempt",
)  # fmt: skip
_STEP = re.compile(r"[0-9]{1,18}")
VALIDATION_COLUMNS = ("step", "val_loss", "bits_per_byte", "ppl", "tokens", "bytes", "attempt")


@dataclass(frozen=True)
class Repair:
    """What was taken out of a table before an attempt goes on with it.

    Attributes:
        torn: Rows that a kill or a full disk had cut.
        replayed: Rows of steps that will be done again.
        steps: Steps of the rows that stay.
    """

    torn: list[str]
    replayed: list[str]
    steps: list[int]


class CsvLog:
    """One table with a header; a row that does not fit on the disk leaves nothing behind."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = list(columns)

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row; None is an empty cell.

        Raises:
            OSError: If the disk is full; the table is then as it was before.
        """
        line = _format([row.get(column) for column in self._columns])
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            head = "" if size else _format(self._columns)
            _write_whole(descriptor, (head + line).encode(), size)
        finally:
            os.close(descriptor)

    def repair(self, last_step: int, keep_replayed: Path) -> Repair:
        """Take out torn rows and rows after `last_step`; the latter move to another file.

        Args:
            last_step: The step the run continues from.
            keep_replayed: Where rows of an abandoned future are kept.
        """
        if not self._path.exists():
            return Repair([], [], [])
        lines = self._path.read_text("utf-8", errors="replace").splitlines(keepends=True)
        kept, torn, replayed, steps = [], [], [], []
        for line in lines[1:]:
            step = self._step_of(line)
            if step is None:
                torn.append(line)
            elif step > last_step:
                replayed.append(line)
            else:
                kept.append(line)
                steps.append(step)
        if torn or replayed or lines[:1] != [_format(self._columns)]:
            self._keep(keep_replayed, replayed)
            write_text(self._path, _format(self._columns) + "".join(kept))
        return Repair(torn, replayed, steps)

    def _keep(self, target: Path, rows: list[str]) -> None:
        if rows:
            target.parent.mkdir(parents=True, exist_ok=True)
            before = (
                target.read_text("utf-8", errors="replace")
                if target.exists()
                else _format(self._columns)
            )
            write_text(target, before + "".join(rows))

    def _step_of(self, line: str) -> int | None:
        cells = line.removesuffix("\n").split(",")  # numbers need no quotes
        is_whole = len(cells) == len(self._columns) and line.endswith("\n")
        if not is_whole or not _STEP.fullmatch(cells[0]):
            return None
        return int(cells[0]) if all(not cell or _is_number(cell) for cell in cells) else None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _format(cells: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(
        ["" if cell is None else cell for cell in cells]
    )
    return buffer.getvalue()


def _write_whole(descriptor: int, content: bytes, size_before: int) -> None:
    try:
        written = os.write(descriptor, content)
        while written < len(content):
            written += os.write(descriptor, content[written:])
    except OSError:
        os.ftruncate(descriptor, size_before)
        raise
