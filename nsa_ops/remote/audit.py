"""Audit: an append-only, hash-chained log of every command that was run on a pod."""

import hashlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from nsa_core.rundir.process import identify
from nsa_core.rundir.redaction import redact
from nsa_ops.errors import OpsError
from nsa_ops.quantities import count_of
from nsa_ops.remote.audit_chain import AuditLog, first_broken_line
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed, Transport

__all__ = ["CALLS", "AuditLog", "AuditedTransport", "first_broken_line"]

#: What an entry may be about: a call of the transport, or a copy of whole folders.
CALLS = ("run", "put", "get", "stream", "tail", "rsync")
_MAX_ARGUMENT = 2_000
_MAX_WORD = 60


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
        return "; ".join(["interrupted by Ctrl-C", *getattr(error, "__notes__", ())])
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
