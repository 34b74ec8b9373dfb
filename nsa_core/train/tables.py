"""training.csv, val.csv and TensorBoard events of a run.

A table has whole rows only and each step once, also after a kill and a resume. TensorBoard events
are written in the loop's own thread, so that a full disk raises where it is met: torch's
SummaryWriter has a thread of its own, where an error of the disk becomes a bare traceback on stderr
and a writer that writes no more. The format is small: records of protocol buffers, the first with
the version, the second with the step from which older points are hidden.
"""

import csv
import io
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nsa_core.rundir.atomic import write_text
from nsa_core.train.disk import LossyWrites

TRAINING_COLUMNS = (
    "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "data_s",
    "skipped", "attempt",
)  # fmt: skip
_STEP = re.compile(r"[0-9]{1,18}")
VALIDATION_COLUMNS = ("step", "val_loss", "bits_per_byte", "ppl", "tokens", "bytes", "attempt")


@dataclass(frozen=True)
class Repair:
    """What was taken out of a table before an attempt continues it.

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
        self.path = path
        self._columns = list(columns)

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row; None is an empty cell.

        Raises:
            OSError: If the disk is full; the table is then as it was before.
        """
        line = _format([row.get(column) for column in self._columns])
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
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
        if not self.path.exists():
            return Repair([], [], [])
        lines = self.path.read_text("utf-8", errors="replace").splitlines(keepends=True)
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
            write_text(self.path, _format(self._columns) + "".join(kept))
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


class TensorBoardLog:
    """TensorBoard scalars of one attempt; the first refusal of the disk ends them, not the run."""

    def __init__(self, folder: Path, attempt: int, writes: LossyWrites) -> None:
        self._folder = folder
        self._attempt = attempt
        self._writes = writes
        self._file: BinaryIO | None = None
        self._records: Any = None

    def open(self, *, purge_step: int) -> None:
        """Begin a file; points of `purge_step` and later from earlier attempts are hidden."""
        self._writes.attempt("TensorBoard", lambda: self._open(purge_step))

    def _open(self, purge_step: int) -> None:
        # imported here because telemetry exists before a run knows that it wants this
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.attempt{self._attempt}"
        self._file = (self._folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def scalars(self, group: str, values: Mapping[str, object], step: int) -> None:
        """One point of each value; readers see it at once."""
        file = self._file
        if file is None:
            return

        def write() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            points = [
                Summary.Value(tag=f"{group}/{name}", simple_value=value)
                for name, value in values.items()
            ]
            self._write(step=step, summary=Summary(value=points))
            file.flush()

        if not self._writes.attempt("TensorBoard", write):
            self.close()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        """Write what is left and end the file."""
        file, self._file = self._file, None
        if file is not None:
            self._writes.attempt("TensorBoard", file.close)
