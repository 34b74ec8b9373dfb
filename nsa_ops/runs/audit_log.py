"""Show the audit log: which command ran on which pod, and whether the chain of hashes is whole."""

import fcntl
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nsa_ops.errors import ConfigurationError, VerificationError
from nsa_ops.remote.audit import CALLS, first_broken_line


@dataclass(frozen=True)
class AuditQuery:
    """Which entries are wanted.

    Attributes:
        pod: Of this pod; empty for all.
        call: One of `CALLS`; empty for all.
        text: With this text in what was done; empty for all.
        failed_only: Only what failed, or ended with another code than 0.
        last: The newest ones of these; 0 for all.
    """

    pod: str = ""
    call: str = ""
    text: str = ""
    failed_only: bool = False
    last: int = 0


@dataclass(frozen=True)
class AuditEntry:
    """One call, as the log has it.

    Attributes:
        line: Number of its line.
        at: Unix seconds.
        pod: Pod.
        call: Which of the door's calls.
        what: Command or path, in one line.
        outcome: Exit code, size, or the error.
        seconds: How long it took.
    """

    line: int
    at: float
    pod: str
    call: str
    what: str
    outcome: str
    seconds: float

    @property
    def has_failed(self) -> bool:
        """It raised, or ended with another code than 0."""
        return self.outcome.startswith("error") or (
            self.outcome.startswith("exit ") and (self.outcome != "exit 0")
        )


@dataclass(frozen=True)
class AuditView:
    """What was asked for, and the state of the whole log.

    Attributes:
        path: The log.
        num_lines: Lines in all.
        broken_line: First line whose hash or predecessor does not agree; None if all do.
        entries: Entries that were asked for, oldest first.
    """

    path: Path
    num_lines: int
    broken_line: int | None
    entries: list[AuditEntry]


def read_audit(path: Path, query: AuditQuery) -> AuditView:
    """Check the chain of the whole log and pick entries; a log that is not there is empty.

    Raises:
        ConfigurationError: If there is no such call: nothing could ever be found.
    """
    _check_call(query.call)
    if not path.exists():
        return AuditView(path, 0, None, [])
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # nobody appends meanwhile
        broken = first_broken_line(path)
        lines = file.read().splitlines()
    found = [entry for entry in _parse(lines) if _fits(entry, query)]
    return AuditView(path, len(lines), broken, found[-query.last :] if query.last else found)


def refusal_of(view: AuditView) -> VerificationError | None:
    """What a broken chain means; None if it is whole."""
    if view.broken_line is None:
        return None
    message = (
        f"Line {view.broken_line} of `{view.path}` is not what was written: its hash, or that of "
        "the line before it, does not agree"
    )
    hint = "What stands before it is as it was written; compare the rest with a copy of the log"
    return VerificationError(message, hint=hint)


def is_pod_unseen(path: Path, pod: str) -> bool:
    """Whether a pod is named of which the log has no entry at all."""
    return pod != "" and not read_audit(path, AuditQuery(pod=pod, last=1)).entries


def _check_call(call: str) -> None:
    if call in {"", *CALLS}:
        return
    near = get_close_matches(call, CALLS, n=1)
    hint = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(CALLS)}"
    message = f"`--call {call}` is no call that is logged"
    raise ConfigurationError(message, hint=hint)


def _parse(lines: list[bytes]) -> Iterator[AuditEntry]:
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
        except ValueError:
            continue  # the chain tells of it
        if isinstance(document, dict):
            yield _entry(number, document)


def _entry(number: int, document: dict[str, Any]) -> AuditEntry:
    argv = document.get("argv")
    places = [str(document[key]) for key in ("source", "target", "path") if key in document]
    what = shlex.join(map(str, argv)) if isinstance(argv, list) else " ".join(places)
    return AuditEntry(
        line=number,
        at=float(document.get("at", 0.0)),
        pod=str(document.get("pod", "")),
        call=str(document.get("call", "")),
        what=" ".join(what.split()),
        outcome=_outcome(document),
        seconds=float(document.get("seconds", 0.0)),
    )


def _outcome(document: dict[str, Any]) -> str:
    if "error" in document:
        return f"error: {document['error']}"
    if "exit_code" in document:
        return f"exit {document['exit_code']}"
    return f"{document.get('bytes', 0)} bytes"


def _fits(entry: AuditEntry, query: AuditQuery) -> bool:
    return (
        query.pod in {"", entry.pod}
        and query.call in {"", entry.call}
        and query.text in entry.what
        and (entry.has_failed or not query.failed_only)
    )
