"""TensorBoard events; the first refusal of the disk ends them, not the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nsa_core.train.disk import LossyWrites

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLog:
    """A SummaryWriter that may be absent."""

    def __init__(self, folder: Path, writes: LossyWrites) -> None:
        self._folder = folder
        self._writes = writes
        self._writer: SummaryWriter | None = None

    def open(self, *, purge_step: int) -> None:
        """Begin to write; events of `purge_step` and later from earlier attempts are hidden."""
        self._writes.attempt("TensorBoard", lambda: self._open(purge_step))

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow, and telemetry loads before torch

        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=30)

    def scalars(self, group: str, values: Mapping[str, object], step: int) -> None:
        """One point of each value."""
        writer = self._writer
        if writer is None:
            return

        def write() -> None:
            for name, value in values.items():
                writer.add_scalar(f"{group}/{name}", value, step)

        if not self._writes.attempt("TensorBoard", write):
            self._writer = None

    def close(self) -> None:
        """Flush what is left."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._writes.attempt("TensorBoard", writer.close)
