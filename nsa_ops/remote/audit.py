"""Audit: an append-only, hash-chained log of every command that was run on a pod."""

import fcntl
import hashlib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.rundir.redaction import redact
from nsa_ops.errors import OpsError
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed, Transport

#: What an entry may be about: a call of the door, or a copy of whole folders.
CALLS = ("run", "put", "get", "stream", "tail", "rsync")
_GENESIS = "0" * 64
_LAST_LINE_BYTES = 65_536
_MAX_ARGUMENT = 2_000
_MAX_TOLD = 60


@dataclass(frozen=True)
class AuditLog:
    """One JSON line a command; each carries the hash of the line before it."""

    path: Path

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry under a file lock, chained to the last one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            chained = {**entry, "previous": _last_hash(file.seek(0, 2), file)}
            chained["sha256"] = _hash_of(chained)
            file.write(json.dumps(chained, ensure_ascii=False).encode() + b"\n")


def first_broken_line(path: Path) -> int | None:
    """Number of the first line whose hash or predecessor does not agree; None if all do."""
    previous = _GENESIS
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
                claimed = entry.pop("sha256")
            except (ValueError, KeyError, AttributeError):
                return number
            if entry.get("previous") != previous or claimed != _hash_of(entry):
                return number
            previous = claimed
    return None


def _hash_of(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _last_hash(end: int, file: Any) -> str:
    """Hash of the last whole line; a torn one is closed so that the chain shows where it broke."""
    if end == 0:
        return _GENESIS
    file.seek(max(0, end - _LAST_LINE_BYTES))
    content = file.read()
    if not content.endswith(b"\n"):
        file.write(b"\n")
    try:
        return str(json.loads(content.strip().split(b"\n")[-1])["sha256"])
    except (ValueError, KeyError, TypeError):
        return _GENESIS


class AuditedTransport:
    """A transport whose every call is written to the audit log; inputs only by their size."""

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
        """The door itself, for copies of whole folders; who uses it calls `record`."""
        return self._inner

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:
        """Run a command and record it, also when it fails."""
        started = time.monotonic()
        facts: dict[str, Any] = {"argv": list(argv), "stdin_bytes": len(stdin)}
        try:
            done = self._inner.run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
        except OpsError as error:
            self.record("run", started, facts | {"error": error.message})
            raise
        sizes = {"stdout_bytes": len(done.stdout), "stderr_bytes": len(done.stderr)}
        self.record("run", started, facts | {"exit_code": done.exit_code} | sizes)
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
        started = time.monotonic()
        facts: dict[str, Any] = {"argv": list(argv), "stdin_bytes": len(stdin), "stdout_bytes": 0}

        def count(piece: bytes) -> None:
            facts["stdout_bytes"] += len(piece)
            sink(piece)

        try:
            done = self._inner.run_into(
                argv, count, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
            )
        except OpsError as error:
            self.record("run", started, facts | {"error": error.message})
            raise
        ending = {"exit_code": done.exit_code, "stderr_bytes": len(done.stderr)}
        self.record("run", started, facts | ending)
        return done

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        """Copy a file to the pod and record its size."""
        started = time.monotonic()
        self._inner.put(source, target, timeout_s=timeout_s)
        size = source.stat().st_size
        self.record("put", started, {"target": target, "bytes": size})

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        """Copy a file from the pod and record its size."""
        started = time.monotonic()
        self._inner.get(source, target, timeout_s=timeout_s)
        size = target.stat().st_size
        self.record("get", started, {"source": source, "bytes": size})

    def stream(
        self,
        path: str,
        offset: int,
        sink: Callable[[bytes], object],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """Read a part of a file as it arrives and record how much came, also when it was cut."""
        started = time.monotonic()
        facts: dict[str, Any] = {"path": path, "offset": offset, "bytes": 0}

        def count(piece: bytes) -> None:
            facts["bytes"] += len(piece)
            sink(piece)

        try:
            self._inner.stream(path, offset, count, max_bytes=max_bytes, timeout_s=timeout_s)
        except OpsError as error:
            self.record("stream", started, facts | {"error": error.message})
            raise
        self.record("stream", started, facts)

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        """Read a part of a file and record how much."""
        started = time.monotonic()
        content = self._inner.tail(path, offset, max_bytes=max_bytes, timeout_s=timeout_s)
        facts = {"path": path, "offset": offset, "bytes": len(content)}
        self.record("tail", started, facts)
        return content

    def record(self, call: str, started: float, facts: dict[str, Any]) -> None:
        """Write one call to the log, every word of it redacted; `started` is monotonic."""
        seconds = round(time.monotonic() - started, 3)
        facts = {key: _redacted(value) for key, value in facts.items()}
        entry = {"at": time.time(), "pod": self._pod, "call": call, "seconds": seconds, **facts}
        self._log.append(entry)
        if self._tell is not None:
            self._tell(_narrate(call, seconds, facts))


def _narrate(call: str, seconds: float, facts: dict[str, Any]) -> str:
    """A call in one line, for people who asked to see every one."""
    named = facts.get("argv") or [
        str(facts[key]) for key in ("source", "target", "path") if key in facts
    ]
    line = shlex.join(word if len(word) <= _MAX_TOLD else f"{word[:_MAX_TOLD]}…" for word in named)
    ended = facts.get("error") or f"exit {facts.get('exit_code', 0)}"
    return f"{call}: {' '.join(line.split())} ({ended}, {seconds:g} s)"


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
    digest = hashlib.sha256(word.encode()).hexdigest()
    return f"{shown[:80]}… ({len(word)} characters, sha256 {digest})"
