"""Write checkpoints in the background, one at a time, and say how each went."""

import threading
import time
from dataclasses import dataclass

from nsa_core.rundir.checkpoint import Checkpoint
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint import CheckpointWriteError, Origin, Snapshot, write_checkpoint


@dataclass(frozen=True)
class SaveResult:
    """How one save went.

    Attributes:
        step: Step of the checkpoint.
        outcome: The whole checkpoint, or why there is none.
        write_s: Seconds of writing and hashing, mostly behind the loop's back.
    """

    step: int
    outcome: Checkpoint | CheckpointWriteError
    write_s: float


class CheckpointSaver:
    """At most one write runs; a second save waits for it, and the wait counts as stall."""

    def __init__(self, run: RunDir, origin: Origin, *, background: bool) -> None:
        self._run = run
        self._origin = origin
        self._background = background
        self._thread: threading.Thread | None = None
        self._result: SaveResult | None = None
        self._bug: BaseException | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Begin to write; returns at once in background mode. Collect the last result first."""
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        if not self._background:
            self._thread.join()

    def collect(self, *, wait: bool = False) -> SaveResult | None:
        """The result of the last save, once; None while it is being written or without one."""
        if self._thread is None:
            return None
        if wait:
            self._thread.join()
        if self._thread.is_alive():
            return None
        self._thread = None
        if self._bug is not None:
            raise self._bug
        result, self._result = self._result, None
        return result

    def _write(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        try:
            outcome: Checkpoint | CheckpointWriteError = write_checkpoint(
                self._run, snapshot, self._origin
            )
        except CheckpointWriteError as error:
            outcome = error
        except BaseException as bug:  # noqa: BLE001 - a thread's edge: the loop raises it again
            self._bug = bug
            return
        self._result = SaveResult(snapshot.state.step, outcome, time.monotonic() - began)
