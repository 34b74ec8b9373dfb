"""PartWriter: bytes that arrive are written and hashed beside the link, in a thread of its own."""

import hashlib
import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_READ_BYTES = 2**20
#: ssh gives small pieces; the thread is woken for this much at a time.
_BATCH_BYTES = 2**20
#: A pod that sends single bytes would fill the memory with them before that.
_BATCH_PIECES = 4096
#: Batches that may wait; a disk slower than the link makes the link wait.
_MAX_WAITING = 16
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITEBACK_BYTES = 16 * 2**20


class PartWriter:
    """Appends to a part, hashing what it held before and what comes.

    Writing and hashing release the interpreter's lock, so they run while the next bytes arrive.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, _FLAGS, 0o666), "a+b")
        self.num_bytes = self._file.seek(0, os.SEEK_END)
        self._held = self._written = self._begun = self.num_bytes
        self._digest = hashlib.sha256()
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._batches: queue.Queue[list[bytes] | None] = queue.Queue(_MAX_WAITING)
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let everything that arrived reach the file, whatever ended the link."""
        self._join()
        self._file.close()

    def write(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            OSError: What the disk said to earlier ones.
        """
        self._raise_error()
        self._batch.append(piece)
        self._batch_bytes += len(piece)
        self.num_bytes += len(piece)
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_PIECES:
            self._hand_over()

    def finish(self) -> str:
        """Make the file durable; its sha256 in hex.

        Raises:
            OSError: What the disk said.
        """
        self._join()
        self._raise_error()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _hand_over(self) -> None:
        self._batches.put(self._batch)
        self._batch, self._batch_bytes = [], 0

    def _join(self) -> None:
        if self._thread.is_alive():
            self._hand_over()
            self._batches.put(None)
            self._thread.join()

    def _work(self) -> None:
        """Hash what was there, then write and hash each piece; after an error only drain."""
        try:
            self._hash_held()
        except OSError as error:
            self._error = error
        while (batch := self._batches.get()) is not None:
            if self._error is None:
                self._take(batch)

    def _hash_held(self) -> None:
        self._file.seek(0)
        left = self._held
        while left and (piece := self._file.read(min(left, _READ_BYTES))):
            self._digest.update(piece)
            left -= len(piece)

    def _take(self, batch: list[bytes]) -> None:
        try:
            self._file.writelines(batch)
        except OSError as error:
            self._error = error
            return
        for piece in batch:
            self._digest.update(piece)
        self._written += sum(len(piece) for piece in batch)
        self._start_writeback()

    def _start_writeback(self) -> None:
        """Let the kernel begin to write to the disk now, so that the end has less to wait for."""
        if self._written - self._begun >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            length = self._written - self._begun
            os.posix_fadvise(self._file.fileno(), self._begun, length, os.POSIX_FADV_DONTNEED)
            self._begun = self._written
