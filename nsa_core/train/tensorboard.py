"""TensorBoard events, written in the loop's own thread so that a full disk raises where it is met.

torch's SummaryWriter writes from a thread of its own, where an error of the disk becomes a bare
traceback on stderr and a writer that says nothing more. The format is small: records of protocol
buffers, the first with the version, the second with the step from which older points are hidden.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from nsa_core.train.disk import LossyWrites


class TensorBoardLog:
    """Scalars of one attempt; the first refusal of the disk ends them, not the run."""

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
