"""SHA-256 of files, remembered by size, change time and inode: a start hashes only what is new."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.data.reporting import OnProgress, StageProgress, ignore_progress
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import JsonError, read_bounded

#: A file that was written this short ago may be written again with the same change time, whose
#: steps are milliseconds on many file systems and a second on some.
SETTLED_S = 2.0
SAVE_EVERY_S = 10.0
#: Reports of known files: one each would cost more than the look itself.
REPORT_EVERY = 100
MAX_THREADS = 8
#: A million files take about 200 MB.
MAX_MEMORY_BYTES = 2**29
POLL_S = 0.1

#: Size in bytes, change time in ns, inode.
Facts = tuple[int, int, int]


HASH_BYTES = 2**20


def hash_watched(path: Path, on_bytes: Callable[[int], None]) -> str:
    """SHA-256 of a file in hexadecimal; `on_bytes` gets the size of each piece and may raise."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASH_BYTES):
            digest.update(piece)
            on_bytes(len(piece))
    return digest.hexdigest()


class KnownHashes(FrozenModel):
    """Content of the memory: size, change time, inode and hash by absolute path."""

    files: dict[str, tuple[int, int, int, str]] = {}


class _StoppedError(Exception):
    """The caller no longer waits for this hash."""


class FileHashes:
    """Hashes files, asking `progress` meanwhile, and remembers what they were.

    A file whose content changes while size, change time and inode stay the same is not noticed;
    `is_forgetful` reads everything again.
    """

    def __init__(
        self,
        memory: Path,
        progress: OnProgress = ignore_progress,
        *,
        is_forgetful: bool = False,
    ) -> None:
        self._memory = memory
        self._progress = progress
        self._known = {} if is_forgetful else dict(_read(memory).files)
        self._is_changed = False
        self._saved_s = time.monotonic()
        self._num_known = 0

    def __call__(self, path: Path) -> str:
        """SHA-256 of a file."""
        known = self.recall(path)
        if known is not None:
            self._num_known += 1
            if self._num_known % REPORT_EVERY == 0:
                self._progress(StageProgress("hash", detail=str(path)))
            return known
        before = _facts(path)
        sha256 = hash_watched(
            path, lambda _: self._progress(StageProgress("hash", detail=str(path)))
        )
        self._remember(path, before, sha256)
        return sha256

    def recall(self, path: Path) -> str | None:
        """The hash of a file that is as it was when it was hashed; None if it is not known."""
        known = self._known.get(str(path.absolute()))
        return known[3] if known is not None and known[:3] == _facts(path) else None

    def all_of(self, paths: Sequence[Path]) -> Iterator[str]:
        """The hash of each file in turn, hashed in several threads.

        Raises:
            OSError: If one cannot be read; at its turn.
        """
        is_stopped = threading.Event()
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            try:
                work = [(path, *self._begin(path, pool, is_stopped)) for path in paths]
                for path, before, future in work:
                    sha256 = self._await(future)
                    self._remember(path, before, sha256)
                    yield sha256
            finally:
                is_stopped.set()

    def save(self) -> None:
        """Write down what is new."""
        if not self._is_changed:
            return
        write_text(self._memory, KnownHashes(files=self._known).model_dump_json() + "\n")
        self._is_changed, self._saved_s = False, time.monotonic()

    def _begin(
        self, path: Path, pool: ThreadPoolExecutor, is_stopped: threading.Event
    ) -> tuple[Facts | None, "Future[str]"]:
        """What a file is now, and its hash to come; a file that is gone fails at its turn."""

        def stop(_: int) -> None:
            if is_stopped.is_set():
                raise _StoppedError

        try:
            known, before = self.recall(path), _facts(path)
        except OSError:
            known, before = None, None
        if known is None:
            return before, pool.submit(hash_watched, path, stop)
        done: Future[str] = Future()
        done.set_result(known)
        return before, done

    def _await(self, future: "Future[str]") -> str:
        while True:
            try:
                return future.result(POLL_S)
            except FutureTimeoutError:
                self._progress(StageProgress("verify"))

    def _remember(self, path: Path, before: Facts | None, sha256: str) -> None:
        """Keep a hash, if the file was left alone long enough to be known again by its facts."""
        if before is None or time.time() - before[1] / 1e9 < SETTLED_S:
            return
        name = str(path.absolute())
        if self._known.get(name) == (*before, sha256):
            return
        self._known[name] = (*before, sha256)
        self._is_changed = True
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            self.save()


def _facts(path: Path) -> Facts:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read(memory: Path) -> KnownHashes:
    """What is remembered; nothing where the file is missing or cannot be read: it saves time."""
    try:
        return KnownHashes.model_validate_json(read_bounded(memory, MAX_MEMORY_BYTES))
    except (OSError, JsonError, ValidationError):
        return KnownHashes()
