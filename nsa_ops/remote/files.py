"""Bring files from a pod: resumed where they were cut, hashed on both ends, renamed when whole."""

import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from nsa_core.rundir.atomic import fsync_dir
from nsa_core.rundir.checkpoint import hash_file
from nsa_core.rundir.names import beside
from nsa_ops.errors import NotFoundError, PartialError, VerificationError
from nsa_ops.remote.inbound import ODD, Listing, parse_listing
from nsa_ops.remote.transport import MAX_LISTING_BYTES, Ceiling, Completed, Transport

#: Bytes of the first round trip, which tells the speed of the link, and seconds of a later one.
CHUNK_BYTES = 16 * 2**20
CHUNK_S = 60.0
CHUNK_TIMEOUT_S = 300.0
LIST_TIMEOUT_S = 300.0
_READ_BYTES = 2**20
#: ssh gives small pieces; the thread is woken for this much at a time.
_BATCH_BYTES = 2**20
#: A pod that sends single bytes would fill the memory with them before that.
_BATCH_PIECES = 4096
#: Batches that may wait; a disk slower than the link makes the link wait.
_MAX_WAITING = 16
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITEBACK_BYTES = 16 * 2**20

_NO_FOLDER = 66
# Links, pipes and devices are named, so that it can be said what is not copied. Each file is hashed
# up to the size it had when it was looked at: appending changes nothing of it.
_LIST = f"""
cd -- "$1" || exit {_NO_FOLDER}
shift
find . "$@" ! -type d ! -type f -exec sh -c '
  for name; do printf "%s%s\\0" "{ODD}" "$name"; done' sh {{}} + -o -type f -exec sh -c '
  for name; do
    size=$(stat -c %s -- "$name" 2>/dev/null) || continue
    sum=$(head -c "$size" < "$name" | sha256sum) || continue
    printf "%s %s %s\\0" "$size" "${{sum%% *}}" "$name"
  done' sh {{}} +
"""


def list_files(
    transport: Transport, folder: PurePosixPath, *, without: Sequence[str] = ()
) -> Listing:
    """All files under a folder on the pod with size and hash, in one round trip.

    What is neither a file nor a folder is refused by its name.

    Args:
        transport: How to reach the pod.
        folder: Absolute folder there.
        without: Names of subfolders to leave out.

    Raises:
        NotFoundError: If the folder does not exist there.
        VerificationError: If the list is longer than any run's.
    """
    pruned = [word for name in without for word in ("-path", f"./{name}", "-prune", "-o")]
    argv = ("sh", "-c", _LIST, "sh", str(folder), *pruned)
    done = transport.run(argv, timeout_s=LIST_TIMEOUT_S, max_bytes=MAX_LISTING_BYTES)
    check_listed(done, folder, transport)
    return parse_listing(done.stdout)


def check_listed(done: Completed, folder: PurePosixPath, transport: Transport) -> None:
    """Raise unless a listing script ended well."""
    if done.exit_code == _NO_FOLDER:
        message = f"`{folder}` does not exist on {transport.where}"
        hint = "Repeat it: a run removes old checkpoints; if the run is gone, see `nsa-ops run ls`"
        raise NotFoundError(message, hint=hint)
    if done.exit_code:
        message = f"`{folder}` on {transport.where} cannot be listed: {done.last_error_line}"
        raise PartialError(
            message, hint="Check that it is readable, and that `find` is installed there"
        )


def is_here(path: Path, *, size: int, sha256: str) -> bool:
    """Whether a path of this machine is a file with this content, and no link."""
    return (
        not path.is_symlink()
        and path.is_file()
        and path.stat().st_size == size
        and hash_file(path) == sha256
    )


def pull_file(
    transport: Transport,
    source: PurePosixPath,
    target: Path,
    *,
    size: int,
    sha256: str,
    on_bytes: Callable[[int], object] = int,
) -> bool:
    """Bring one file, whole or not at all; what arrived before a cut is used.

    The bytes go to `.NAME.part` beside the target. A part that turns out to belong to other content
    is thrown away and the file is brought from its beginning, once.

    Args:
        transport: How to reach the pod.
        source: Absolute path there.
        target: Path here; replaced only by content with the right hash.
        size: Bytes to bring; the file may have grown since.
        sha256: Hash that those bytes must have.
        on_bytes: Called with the number of bytes of each piece that arrived.

    Returns:
        Whether anything had to be brought.

    Raises:
        VerificationError: If the content does not have its hash; names both.
        NotFoundError, PodUnreachableError, DeadlineError: From the transport; the part stays.
    """
    if is_here(target, size=size, sha256=sha256):
        return False
    part = part_of(target)
    begun = begin_part(target, size) > 0
    found = _append_rest(transport, source, part, size, on_bytes)
    if found != sha256 and begun:
        part.unlink()
        found = _append_rest(transport, source, part, size, on_bytes)
    if found != sha256:
        bytes_found = part.stat().st_size
        part.unlink()
        raise other_content(source, found, bytes_found, sha256=sha256, size=size)
    part.replace(target)
    fsync_dir(target.parent)
    return True


def other_content(
    source: PurePosixPath, found: str, num_bytes: int, *, sha256: str, size: int
) -> VerificationError:
    """The error for a file that arrived with another hash than it was announced with."""
    message = (
        f"`{source}` arrived with sha256 {found} ({num_bytes} bytes), "
        f"but {sha256} ({size} bytes) was expected"
    )
    return VerificationError(message, hint="See its `sha256sum` on the pod")


def part_of(target: Path) -> Path:
    """Where the bytes of a file are collected until it is whole."""
    return target.with_name(beside(target.name, ".part"))


def bytes_here(target: Path) -> int:
    """Bytes of a file that have arrived already, in its part."""
    part = part_of(target)
    return part.lstat().st_size if part.is_file() and not part.is_symlink() else 0


def begin_part(target: Path, size: int) -> int:
    """Bytes of a file that are here; logs only grow, so an older copy is a good beginning."""
    part = part_of(target)
    if part.is_symlink() or (part.exists() and part.stat().st_size > size):
        part.unlink()
    if not part.exists() and target.is_file() and 0 < target.stat().st_size < size:
        shutil.copyfile(target, part)
    return bytes_here(target)


def _append_rest(
    transport: Transport,
    source: PurePosixPath,
    part: Path,
    size: int,
    on_bytes: Callable[[int], object],
) -> str:
    """Bring what a part lacks, make it durable, and give the sha256 of all of it."""
    with PartWriter(part) as writer:
        wanted = CHUNK_BYTES
        while (offset := writer.num_bytes) < size:
            began_s = time.monotonic()
            asked = min(wanted, size - offset)
            sink = Ceiling(_counted(writer.write, on_bytes), asked, f"`{source}`")
            transport.stream(str(source), offset, sink, max_bytes=asked, timeout_s=CHUNK_TIMEOUT_S)
            if writer.num_bytes == offset:
                break
            wanted = next_chunk(writer.num_bytes - offset, time.monotonic() - began_s)
        return writer.finish()


def next_chunk(num_bytes: int, seconds: float) -> int:
    """Bytes to ask for next: about a minute's worth, far from the deadline on any link."""
    return max(CHUNK_BYTES, int(num_bytes / max(seconds, 1e-3) * CHUNK_S))


def _counted(
    write: Callable[[bytes], object], on_bytes: Callable[[int], object]
) -> Callable[[bytes], object]:
    def take(piece: bytes) -> None:
        write(piece)
        on_bytes(len(piece))

    return take


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
