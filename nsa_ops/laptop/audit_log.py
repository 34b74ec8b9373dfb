"""Show the audit log: which command ran on which pod, and whether the chain of hashes is whole."""

import fcntl
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nsa_core.rundir.process import ProcessIdentity, is_alive
from nsa_ops.errors import ConfigurationError, VerificationError
from nsa_ops.remote.audit import CALLS, Chain, ChainHead, read_chain

_CUT_OFF = "cut off"
#: `env`, variables without blanks in their values, and those that it removes.
_ENVIRONMENT = re.compile(r"env(?: -u \w+| \w+=[^\s']*)+ ")
_MAX_S = 1e12


@dataclass(frozen=True)
class AuditQuery:
    """Which entries are wanted."""

    pod: str = ""  # of this pod; empty for all
    call: str = ""  # one of `CALLS`; empty for all
    text: str = ""  # with this text in what was done; empty for all
    failed_only: bool = False  # only what failed, or ended with another code than 0
    last: int = 0  # the newest ones of these; 0 for all


@dataclass(frozen=True)
class AuditEntry:
    """One call, as the log has it."""

    line: int  # number of its last line; a call has one when it begins and one when it ended
    at: float
    pod: str
    call: str  # one of `CALLS`
    what: str  # command or path, in one line
    outcome: str  # exit code, size, or the error
    seconds: float  # how long it took

    @property
    def command(self) -> str:
        """What was done, without the environment that a command was given."""
        found = _ENVIRONMENT.match(self.what)
        return self.what[found.end() :] if found else self.what

    @property
    def outcome_first(self) -> str:
        """How it ended and what was done, in one sentence."""
        return f"{self.outcome}: {self.command}"

    @property
    def has_failed(self) -> bool:
        """It raised, was cut off, or ended with another code than 0."""
        return self.outcome.startswith(("error", _CUT_OFF)) or (
            self.outcome.startswith("exit ") and (self.outcome != "exit 0")
        )


@dataclass(frozen=True)
class AuditView:
    """What was asked for, and the state of the whole log."""

    path: Path
    num_lines: int
    num_entries: int
    num_cut_off: int  # calls that began and never ended, because their command was killed
    broken_line: int | None  # first line whose hash or predecessor does not agree; None if all do
    missing: str  # what was written and is not there any more, in words; empty if nothing
    entries: list[AuditEntry]  # entries that were asked for, oldest first

    @property
    def is_whole(self) -> bool:
        """Every line that was written is there as it was written."""
        return self.broken_line is None and not self.missing


def read_audit(path: Path, query: AuditQuery, head: ChainHead | None = None) -> AuditView:
    """Check the chain of the whole log and pick entries; a log that is not there is empty.

    Args:
        path: The log.
        query: Which entries.
        head: What is known of its end, kept apart; None checks the lines alone.

    Raises:
        ConfigurationError: If there is no such call: nothing could ever be found.
        LocalResourceError: If the head cannot be read.
    """
    _check_call(query.call)
    chain, lines = _read_locked(path, head)
    entries = _parse(lines)
    found = [entry for entry in entries if _fits(entry, query)]
    return AuditView(
        path=path,
        num_lines=chain.num_lines,
        num_entries=len(entries),
        num_cut_off=sum(entry.outcome.startswith(_CUT_OFF) for entry in entries),
        broken_line=chain.broken_line,
        missing=chain.missing,
        entries=found[-query.last :] if query.last else found,
    )


def _read_locked(path: Path, head: ChainHead | None) -> tuple[Chain, list[bytes]]:
    """The state of the log and its lines, while nobody appends."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            chain = read_chain(path, head.read() if head is not None else None)
            return chain, file.read().split(b"\n")
    except FileNotFoundError:
        return read_chain(path, head.read() if head is not None else None), []


def refusal_of(view: AuditView) -> VerificationError | None:
    """What a log that is not whole means; None if it is."""
    if view.missing:
        message = f"`{view.path}` lacks {view.missing}"
        hint = (
            "Look for a copy of the log; the next command continues it, and the gap stays on record"
        )
        return VerificationError(message, hint=hint)
    if view.broken_line is None:
        return None
    message = (
        f"Line {view.broken_line} of `{view.path}` is not what was written: its hash, or that of "
        "the line before it, does not agree"
    )
    hint = "Everything before it is as it was written; compare the rest with a copy of the log"
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


def _parse(lines: list[bytes]) -> list[AuditEntry]:
    """Calls in the order of their last lines; an earlier version wrote one line a call."""
    begun: dict[str, tuple[int, dict[str, Any]]] = {}
    entries = []
    for number, document in _documents(lines):
        if "begun_by" in document:
            begun[str(document.get("id"))] = number, document
        else:
            _, before = begun.pop(str(document.get("id")), (0, {}))
            known = {key: value for key, value in before.items() if key != "begun_by"}
            entries.append(_entry(number, known | document))
    entries += [_entry(number, document) for number, document in begun.values()]
    return sorted(entries, key=lambda entry: entry.line)


def _documents(lines: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the chain of hashes reports it
        if isinstance(document, dict):
            yield number, document


def _entry(number: int, document: dict[str, Any]) -> AuditEntry:
    argv = document.get("argv")
    places = [str(document[key]) for key in ("source", "target", "path") if key in document]
    what = shlex.join(map(str, argv)) if isinstance(argv, list) else " ".join(places)
    return AuditEntry(
        line=number,
        at=_number(document.get("at")),
        pod=str(document.get("pod", "")),
        call=str(document.get("call", "")),
        what=" ".join(what.split()),
        outcome=_outcome(document),
        seconds=_number(document.get("seconds")),
    )


def _number(value: object) -> float:
    """A number of seconds; 0 for what a damaged line has instead."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < _MAX_S else 0.0


def _outcome(document: dict[str, Any]) -> str:
    if "begun_by" in document:
        return _without_end(document["begun_by"])
    if "error" in document:
        return f"error: {document['error']}"
    if "exit_code" in document:
        return f"exit {document['exit_code']}"
    return f"{document.get('bytes', 0)} bytes"


def _without_end(begun_by: object) -> str:
    """What a beginning without an end means: its command is at work, or was killed."""
    try:
        identity = ProcessIdentity.model_validate(begun_by)
    except ValidationError:  # a system without /proc
        return "under way, or its command was killed"
    if is_alive(identity):
        return f"under way in process {identity.pid}"
    return f"{_CUT_OFF}: process {identity.pid} was killed, and what it began may still run there"


def _fits(entry: AuditEntry, query: AuditQuery) -> bool:
    return (
        query.pod in {"", entry.pod}
        and query.call in {"", entry.call}
        and query.text in entry.what
        and (entry.has_failed or not query.failed_only)
    )
