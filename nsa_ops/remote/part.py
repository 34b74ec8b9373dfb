"""PartWriter: bytes that arrive are written and hashed beside the link, in a thread of its own."""

import hashlib
import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_READ_BYTES = 2**20
#: Pieces that may wait; a disk slower than the link makes the link wait.
_MAX_WAITING = 32


class PartWriter:
    """Appends to a part, hashing what it held before and what comes.

    Writing and hashing release the interpreter's lock, so they run while the next bytes arrive.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        self.num_bytes = self._file.seek(0, os.SEEK_END)
        self._held = self.num_bytes
        self._digest = hashlib.sha256()
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
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
        self._pieces.put(piece)
        self.num_bytes += len(piece)

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

    def _join(self) -> None:
        if self._thread.is_alive():
            self._pieces.put(None)
            self._thread.join()

    def _work(self) -> None:
        """Hash what was there, then write and hash each piece; after an error only drain."""
        try:
            self._hash_held()
        except OSError as error:
            self._error = error
        while (piece := self._pieces.get()) is not None:
            if self._error is None:
                self._take(piece)

    def _hash_held(self) -> None:
        self._file.seek(0)
        left = self._held
        while left and (piece := self._file.read(min(left, _READ_BYTES))):
            self._digest.update(piece)
            left -= len(piece)

    def _take(self, piece: bytes) -> None:
        try:
            self._file.write(piece)
            self._digest.update(piece)
        except OSError as error:
            self._error = error
