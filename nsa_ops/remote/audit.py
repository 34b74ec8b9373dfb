"""Audit: an append-only, hash-chained log of every command that was run on a pod.

Each line carries the hash of the one before it. A chain alone cannot show that its end was cut off,
or that there ever was one. So its head (how many lines, and the hash of the last) is kept apart,
and a log that lacks it is not whole.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from nsa_core.config.base import disk_advice
from nsa_core.rundir.process import identify
from nsa_core.rundir.redaction import redact
from nsa_ops.errors import LocalResourceError, OpsError, Terminated
from nsa_ops.quantities import count_of
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed, Transport

#: What an entry may be about: a call of the transport, or a copy of whole folders.
CALLS = ("run", "put", "get", "stream", "tail", "rsync")
_MAX_ARGUMENT = 2_000
_MAX_WORD = 60
GENESIS = "0" * 64
_BLOCK_BYTES = 65_536


@dataclass(frozen=True)
class Head:
    """How far a log had come when it was last written: lines, bytes, hash of the last line."""

    lines: int
    bytes: int
    sha256: str


class ChainHead(Protocol):
    """Where the head is kept."""

    def read(self) -> Head | None:
        """The head; None if none was ever kept."""
        ...

    def write(self, head: Head) -> None:
        """Keep it."""
        ...


@dataclass(frozen=True)
class Chain:
    """The state of a log: its lines, the first broken one, and what the head knows but it lacks."""

    num_lines: int
    broken_line: int | None
    missing: str = ""


@dataclass(frozen=True)
class AuditLog:
    """One JSON line an entry; each carries the hash of the line before it.

    `unrecorded` takes why a line cannot be written, and the act continues; None refuses the act.
    """

    path: Path
    head: ChainHead | None = None
    unrecorded: Callable[[str], None] | None = None

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry under a file lock, chained to the last one; whole or not at all.

        Raises:
            LocalResourceError: If it cannot be written, unless the act continues without it.
        """
        try:
            with _locked(self.path) as descriptor:
                self._append(descriptor, entry)
        except OSError as error:
            message = f"The audit log `{self.path}` cannot be written: {error.strerror or error}"
            self._report_or_raise(LocalResourceError(message, hint=disk_advice(error)))
        except LocalResourceError as error:
            self._report_or_raise(error)

    def _report_or_raise(self, error: OpsError) -> None:
        if self.unrecorded is None:
            raise error
        self.unrecorded(error.message)

    def _append(self, descriptor: int, entry: dict[str, Any]) -> None:
        head = self.head.read() if self.head is not None else None
        end = os.fstat(descriptor).st_size
        known = _catch_up(descriptor, end, head)
        chained = {**entry, "previous": known.sha256}
        chained["sha256"] = _hash_of(chained)
        line = json.dumps(chained).encode() + b"\n"
        if end and os.pread(descriptor, 1, end - 1) != b"\n":  # torn: a kill, or an old version
            line = b"\n" + line
        _write_whole(descriptor, line, end)
        if self.head is not None:
            num_lines = known.lines + line.count(b"\n")
            self.head.write(Head(num_lines, end + len(line), chained["sha256"]))


def _catch_up(descriptor: int, end: int, head: Head | None) -> Head:
    """How far the log has come now: number of lines, and the hash that the next line must carry.

    Where the log is not what the head says, the next line carries the hash of what is missing, so
    that the chain breaks there for good.
    """
    if head is not None and (
        end < head.bytes or _hash_before(descriptor, head.bytes) != head.sha256
    ):
        return Head(_count_lines(descriptor, 0, end), end, head.sha256)
    start = head or Head(0, 0, GENESIS)
    if end == start.bytes:
        return start
    # Lines of an earlier version, or the head could not be written.
    last = _hash_before(descriptor, end) or (start.sha256 if head else GENESIS)
    return Head(start.lines + _count_lines(descriptor, start.bytes, end), end, last)


def _hash_before(descriptor: int, end: int) -> str:
    """Hash of the line that ends at an offset; empty if none does."""
    line = _line_before(descriptor, end)
    try:
        return str(json.loads(line)["sha256"]) if line.endswith(b"\n") else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _line_before(descriptor: int, end: int) -> bytes:
    """The last line before an offset, of any length."""
    found, at = b"", end
    while at > 0:
        size = min(_BLOCK_BYTES, at)
        at -= size
        found = os.pread(descriptor, size, at) + found
        if b"\n" in found[:-1]:
            break
    return found[found[:-1].rfind(b"\n") + 1 :]


def _count_lines(descriptor: int, start: int, end: int) -> int:
    count, at = 0, start
    while at < end and (block := os.pread(descriptor, min(_BLOCK_BYTES, end - at), at)):
        count, at = count + block.count(b"\n"), at + len(block)
    return count


def _write_whole(descriptor: int, line: bytes, end: int) -> None:
    """Append a line; where the disk takes only a part of it, take that part back."""
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.ftruncate(descriptor, end)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def read_chain(path: Path, head: Head | None) -> Chain:
    """Check every line of a log, and that it holds what its head says."""
    if not path.exists():
        missing = (
            f"all that was written, {count_of(head.lines, 'line')}" if head is not None else ""
        )
        return Chain(0, None, missing)
    previous, broken, number = GENESIS, None, 0
    at_head = GENESIS
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            previous = _next_hash(line, previous) if broken is None else previous
            if broken is None and not previous:
                broken = number
            if head is not None and number == head.lines:
                at_head = previous
    missing = ""
    if head is not None and broken is None and at_head != head.sha256:
        lacks = f"its end: {count_of(head.lines, 'line')} written, and {number} there"
        missing = lacks if number < head.lines else f"line {head.lines} as it was written"
    return Chain(number, broken, missing)


def first_broken_line(path: Path) -> int | None:
    """Number of the first line whose hash or predecessor does not agree; None if all do."""
    return read_chain(path, None).broken_line


def _next_hash(line: bytes, previous: str) -> str:
    """Hash of a line that follows another one; empty if it does not."""
    try:
        entry = json.loads(line)
        claimed = str(entry.pop("sha256"))
    except (ValueError, KeyError, AttributeError, RecursionError):
        return ""
    if not line.endswith(b"\n") or entry.get("previous") != previous or claimed != _hash_of(entry):
        return ""
    return claimed


def _hash_of(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


class AuditedTransport:
    """A transport whose every call is written to the audit log; inputs only by their size.

    A call has two lines with one id: what begins, and how it ended, however it did. So a command
    that was killed leaves a line without its end.
    """

    def __init__(
        self,
        inner: Transport,
        log: AuditLog,
        pod: str,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._inner = inner
        self._tell = tell
        self._log = log
        self._pod = pod

    @property
    def where(self) -> str:
        """The pod in words."""
        return self._inner.where

    @property
    def inner(self) -> Transport:
        """The transport itself, for copies of whole folders; its calls belong into `recorded`."""
        return self._inner

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:
        """Run a command."""
        with self.recorded("run", {"argv": list(argv), "stdin_bytes": len(stdin)}) as end:
            done = self._inner.run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
            end["exit_code"] = done.exit_code
            end |= {"stdout_bytes": len(done.stdout), "stderr_bytes": len(done.stderr)}
        return done

    def run_into(
        self,
        argv: Sequence[str],
        sink: Callable[[bytes], object],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        max_bytes: int,
    ) -> Completed:
        """Run a command whose stdout goes to a sink, and record it, also when it was cut."""
        with self.recorded("run", {"argv": list(argv), "stdin_bytes": len(stdin)}) as end:
            end["stdout_bytes"] = 0

            def count(piece: bytes) -> None:
                end["stdout_bytes"] += len(piece)
                sink(piece)

            done = self._inner.run_into(
                argv, count, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
            )
            end |= {"exit_code": done.exit_code, "stderr_bytes": len(done.stderr)}
        return done

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        """Copy a file to the pod."""
        with self.recorded("put", {"target": target}) as end:
            self._inner.put(source, target, timeout_s=timeout_s)
            end["bytes"] = source.stat().st_size

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        """Copy a file from the pod."""
        with self.recorded("get", {"source": source}) as end:
            self._inner.get(source, target, timeout_s=timeout_s)
            end["bytes"] = target.stat().st_size

    def stream(
        self,
        path: str,
        offset: int,
        sink: Callable[[bytes], object],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """Read a part of a file as it arrives; what came is recorded also when it was cut."""
        with self.recorded("stream", {"path": path, "offset": offset}) as end:
            end["bytes"] = 0

            def count(piece: bytes) -> None:
                end["bytes"] += len(piece)
                sink(piece)

            self._inner.stream(path, offset, count, max_bytes=max_bytes, timeout_s=timeout_s)

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        """Read a part of a file."""
        with self.recorded("tail", {"path": path, "offset": offset}) as end:
            content = self._inner.tail(path, offset, max_bytes=max_bytes, timeout_s=timeout_s)
            end["bytes"] = len(content)
        return content

    @contextmanager
    def recorded(self, call: str, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Record the call in the block: that it begins, and how it ended, also by Ctrl-C.

        Args:
            call: One of `CALLS`.
            facts: What is known before.

        Yields:
            Facts of the end: the block adds what it learns.
        """
        started, number = time.monotonic(), secrets.token_hex(8)
        self._append(call, facts | {"id": number, "begun_by": _process(os.getpid())})
        learned: dict[str, Any] = {"id": number}
        try:
            yield learned
        except BaseException as error:
            learned["error"] = _why(error)
            raise
        finally:
            learned["seconds"] = round(time.monotonic() - started, 3)
            self._append(call, learned)
            if self._tell is not None:
                shown = {key: _redacted(value) for key, value in (facts | learned).items()}
                self._tell(_narrate(call, shown))

    def _append(self, call: str, facts: dict[str, Any]) -> None:
        """Write a line to the log, every word of it redacted."""
        kept = {key: _redacted(value) for key, value in facts.items()}
        self._log.append({"at": time.time(), "pod": self._pod, "call": call, **kept})


@cache
def _process(pid: int) -> dict[str, Any] | None:
    """Who makes the call: a call without an end is still running while this process lives."""
    identity = identify(pid)
    return identity.model_dump() if identity is not None else None


def _why(error: BaseException) -> str:
    if isinstance(error, OpsError):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        by = "TERM" if isinstance(error, Terminated) else "Ctrl-C"
        return "; ".join([f"interrupted by {by}", *getattr(error, "__notes__", ())])
    return f"{type(error).__name__}: {error}"


def _narrate(call: str, facts: dict[str, Any]) -> str:
    """A call in one line, for people who asked to see every one."""
    named = facts.get("argv") or [
        str(facts[key]) for key in ("source", "target", "path") if key in facts
    ]
    line = shlex.join(word if len(word) <= _MAX_WORD else f"{word[:_MAX_WORD]}…" for word in named)
    ended = facts.get("error") or f"exit {facts.get('exit_code', 0)}"
    return f"{call}: {' '.join(line.split())} ({ended}, {facts['seconds']:g} s)"


def _redacted(value: Any) -> Any:
    """Words without secrets; a size or a code as it is."""
    if isinstance(value, list):
        return [_clip(word) for word in value]
    return redact(value) if isinstance(value, str) else value


def _clip(word: str) -> str:
    """A word without secrets; a long one (a script) by its beginning and the hash of all of it."""
    shown = redact(word)
    if len(word) <= _MAX_ARGUMENT:
        return shown
    digest = hashlib.sha256(word.encode(errors="surrogatepass")).hexdigest()
    return f"{shown[:80]}… ({count_of(len(word), 'character')}, sha256 {digest})"
