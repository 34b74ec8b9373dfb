"""Bring many small files as one stream, each hashed as it arrives and renamed when it is whole."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import fsync_dir
from nsa_ops.errors import NotFoundError, OpsError, VerificationError
from nsa_ops.remote.files import (
    CHUNK_BYTES,
    CHUNK_TIMEOUT_S,
    begin_part,
    check_listed,
    next_chunk,
    other_content,
    part_of,
)
from nsa_ops.remote.inbound import RemoteFile
from nsa_ops.remote.pod_files import DD
from nsa_ops.remote.transport import OversizeError, Transport

#: Larger files have a stream of their own, which needs no memory.
SMALL_BYTES = 2**20
_MAX_FILES = 4096
_NO_FOLDER = 66

# Asked for by name, offset and number of bytes, one a line: names with a newline are refused
# before. Exactly that many bytes are sent, zeros for a file that has become shorter: so where each
# file begins is known here and need not be believed.
_SEND = f"""
cd -- "$1" || exit {_NO_FOLDER}
while IFS= read -r name && IFS= read -r offset && IFS= read -r count; do
  name=./$name
  size=$([ -f "$name" ] && stat -c %s -- "$name") || size=0
  if [ "$size" -lt $((offset + count)) ]; then head -c "$count" /dev/zero
  elif [ "$offset" = 0 ]; then head -c "$count" -- "$name"
  else {DD} iflag=skip_bytes,count_bytes skip="$offset" count="$count" if="$name"
  fi
done
"""


class _OutOfStepError(VerificationError):
    """Two files in a row have other content: what arrives may not begin where it should."""


@dataclass(eq=False)
class _SmallFile:
    """One file under way.

    Attributes:
        file: What was announced.
        source: Where it is on the pod.
        target: Where it goes.
        held: Bytes that are in its part.
        rest: Bytes that arrived after them.
        is_over: It is whole, or has failed.
        error: Why it failed.
    """

    file: RemoteFile
    source: PurePosixPath
    target: Path
    held: int
    rest: bytearray = field(default_factory=bytearray)
    is_over: bool = False
    error: OpsError | None = None

    @property
    def wanted(self) -> int:
        """Bytes to ask for."""
        return self.file.size - self.held

    def finish(self) -> bool:
        """Hash all of it; rename it if it is what was announced. Whether it was."""
        part = part_of(self.target)
        content = part.read_bytes() if self.held else b""
        found = hashlib.sha256(content + self.rest).hexdigest()
        if found != self.file.sha256:
            self._fail(found, len(content) + len(self.rest))
            return False
        _append(part, self.rest)
        part.replace(self.target)
        self.is_over = True
        return True

    def _fail(self, found: str, num_bytes: int) -> None:
        """Begin anew where the part was other content; else it has failed."""
        part_of(self.target).unlink(missing_ok=True)
        is_gone = not any(self.rest)
        self.rest.clear()
        if self.held:
            self.held = 0
            return
        self.is_over = True
        sha256, size = self.file.sha256, self.file.size
        if is_gone:
            message = f"`{self.source}` is gone, or has become shorter than its {size} bytes"
            self.error = NotFoundError(message, hint="Pull again")
        else:
            self.error = other_content(self.source, found, num_bytes, sha256=sha256, size=size)

    def begin_anew(self) -> None:
        """Forget what arrived in a stream that was out of step."""
        self.rest.clear()
        self.is_over, self.error = False, None

    def keep(self) -> None:
        """Put what arrived into the part; the next pull continues there."""
        if self.rest:
            _append(part_of(self.target), self.rest)
            self.held += len(self.rest)
            self.rest.clear()


def _append(part: Path, content: bytes | bytearray) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class _Stream:
    """Cuts one stream into its files."""

    def __init__(
        self,
        arrivals: Sequence[_SmallFile],
        on_bytes: Callable[[int], object],
        on_file: Callable[[RemoteFile], object],
    ) -> None:
        self._arrivals = arrivals
        self._on_bytes = on_bytes
        self._on_file = on_file
        self._at = 0
        self._is_in_doubt = False
        self.num_bytes = sum(one.wanted for one in arrivals)

    @property
    def asked(self) -> bytes:
        """What the pod is asked for, in the form that its script reads."""
        lines = (f"{one.file.name}\n{one.held}\n{one.wanted}\n" for one in self._arrivals)
        return "".join(lines).encode()

    @property
    def current(self) -> _SmallFile | None:
        """The file that is arriving; None once all have."""
        return self._arrivals[self._at] if self._at < len(self._arrivals) else None

    def feed(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            VerificationError: If the stream is out of step.
            OSError: What the disk said.
        """
        self._on_bytes(len(piece))
        view = memoryview(piece)
        while (one := self.current) is not None:
            missing = one.wanted - len(one.rest)
            one.rest += view[:missing]
            view = view[missing:]
            if len(one.rest) < one.wanted:
                return
            self._finish(one)

    def _finish(self, one: _SmallFile) -> None:
        is_good = one.finish()
        if is_good:
            self._on_file(one.file)
        elif self._is_in_doubt:
            one.begin_anew()
            message = f"`{one.source}` and the file before it have other content than announced"
            raise _OutOfStepError(message)
        self._is_in_doubt = not is_good
        self._at += 1

    def end(self, error: OpsError | None) -> None:
        """The stream has ended: the file that is not whole has failed, or the one before it."""
        one = self.current
        if one is None or isinstance(error, _OutOfStepError):
            return
        if self._is_in_doubt:
            one.begin_anew()
            return
        message = f"`{one.source}` ended after {one.held + len(one.rest)} of {one.file.size} bytes"
        one.rest.clear()
        one.is_over, one.error = True, error or VerificationError(message)


@dataclass(frozen=True)
class Brought:
    """Why files were not copied, by name, and what the pod sent after the last file."""

    failures: dict[str, OpsError]
    surplus: OpsError | None


def pull_small_files(
    transport: Transport,
    folder: PurePosixPath,
    files: Iterable[tuple[RemoteFile, Path]],
    *,
    on_bytes: Callable[[int], object],
    on_file: Callable[[RemoteFile], object],
) -> Brought:
    """Bring small files of a folder, as many as fit into one stream at a time.

    What arrived of a file before the link was cut is kept in its part. A file that arrives with
    other content costs only itself: the stream is begun anew behind it where it is out of step.

    Args:
        transport: How to reach the pod.
        folder: Folder there.
        files: Each file with its path here, whose parent exists.
        on_bytes: Called with the number of bytes of each piece that arrived.
        on_file: Called with each file that is complete and verified.

    Raises:
        NotFoundError: If the folder does not exist.
        PodUnreachableError, DeadlineError: From the transport; what arrived stays.
    """
    queue = [
        _SmallFile(file, folder / file.name, target, begin_part(target, file.size))
        for file, target in files
    ]
    arrivals, surplus, wanted = list(queue), None, CHUNK_BYTES
    while queue:
        stream = _Stream(_take(queue, wanted), on_bytes, on_file)
        began_s = time.monotonic()
        surplus = _receive(transport, folder, stream) or surplus
        wanted = next_chunk(stream.num_bytes, time.monotonic() - began_s)
        queue = [one for one in queue if not one.is_over]
    for parent in {one.target.parent for one in arrivals}:
        fsync_dir(parent)
    return Brought({one.file.name: one.error for one in arrivals if one.error}, surplus)


def _take(queue: Sequence[_SmallFile], wanted: int) -> list[_SmallFile]:
    """The next files: about that many bytes, and at least one file."""
    taken: list[_SmallFile] = []
    num_bytes = 0
    for one in queue[:_MAX_FILES]:
        if taken and num_bytes + one.wanted > wanted:
            break
        taken.append(one)
        num_bytes += one.wanted
    return taken


def _receive(transport: Transport, folder: PurePosixPath, stream: _Stream) -> OpsError | None:
    """One stream to its end; what was sent beyond it is an error of its own."""
    asked = stream.asked
    try:
        stream.feed(b"")  # files of which nothing is missing are whole before anything arrives
        if not stream.num_bytes:
            return None
        done = transport.run_into(
            ("sh", "-c", _SEND, "sh", str(folder)), stream.feed,
            stdin=asked, timeout_s=CHUNK_TIMEOUT_S, max_bytes=stream.num_bytes,
        )  # fmt: skip
    except (OversizeError, _OutOfStepError) as error:
        is_surplus = stream.current is None
        stream.end(error)
        return error if is_surplus else None
    except BaseException:
        if stream.current is not None:
            stream.current.keep()
        raise
    check_listed(done, folder, transport)
    stream.end(None)
    return None
