"""The registry: pods, runs, reports and receipts of this laptop, and acts that were started."""

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import ValidationError

from nsa_core.config.base import disk_advice
from nsa_core.rundir.redaction import redact
from nsa_core.rundir.report import Report
from nsa_ops.errors import DeadlineError, LocalResourceError, PodUnreachableError
from nsa_ops.local_files import create_private, make_private_folder
from nsa_ops.store.database import UPDATE, describe_newer, load_registry, read_version, write_tables
from nsa_ops.store.records import Intent, PodRecord, Receipt, RunRecord

#: The registry, in the state folder.
REGISTRY_NAME = "registry.sqlite"
#: Commands that also work where nothing can be recorded.
EMERGENCY = "`status`, `watch`, `logs`, `halt` and `pod ssh` work meanwhile"
_ADVICE = {
    sqlite3.SQLITE_FULL: "Free space",
    sqlite3.SQLITE_READONLY: "Check the permissions, and whether the disk is mounted read-only",
    sqlite3.SQLITE_CANTOPEN: "Check the permissions, and whether the disk is mounted read-only",
    sqlite3.SQLITE_BUSY: "End the other nsa-ops, or try again",
    sqlite3.SQLITE_LOCKED: "End the other nsa-ops, or try again",
    sqlite3.SQLITE_IOERR: "Check the disk: it fails, or is full",
}
_BUSY_S = 10.0
RecordT = TypeVar("RecordT", PodRecord, RunRecord, Receipt, Intent)


def _refusal(path: Path, error: sqlite3.Error | ValidationError) -> LocalResourceError:
    """An error of sqlite about the registry, with what to do."""
    if isinstance(error, sqlite3.OperationalError):
        message = f"The registry `{path}` refused: {error}"
        return LocalResourceError(message, hint=f"{registry_advice(error)}; {EMERGENCY}")
    what = str(error).splitlines()[0]
    return LocalResourceError(
        f"The registry `{path}` is damaged: {what}",
        hint=f"Try `sqlite3 {path} .recover | sqlite3 NEW_FILE`, or move it away and add the pods "
        "again; the runs are on their pods, and the same `launch --run-id` finds one again",
    )


def _record_of(kind: type[RecordT], table: str, row: tuple[Any, ...]) -> RecordT:
    """A row as a record; raise sqlite3.DatabaseError where a cell holds what none of ours does."""
    for field, value in zip(fields(kind), row, strict=True):
        if not isinstance(value, field.type):  # type: ignore[arg-type]
            message = f"{table}.{field.name} holds {value!r:.40}"
            raise sqlite3.DatabaseError(message)
    record = kind(*row)
    try:
        for parsed in ("others", "details"):  # what records read from a column of JSON
            getattr(record, parsed, None)
    except (ValueError, TypeError) as error:
        message = f"a row of {table} holds no JSON of ours: {error}"
        raise sqlite3.DatabaseError(message) from error
    return record


def registry_advice(error: sqlite3.Error) -> str:
    """What to do about an sqlite error that is no damage, as the beginning of a hint."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says where it was found
    return _ADVICE.get(code, "Check whether the disk is full, and the permissions")


@dataclass(frozen=True)
class Hold:
    """The lock of one act; the kernel releases it when the process ends, however it ends."""

    path: Path
    file: IO[bytes]

    def release(self) -> None:
        """Release the lock and remove its file."""
        self.path.unlink(missing_ok=True)
        self.file.close()


def _take_hold(folder: Path, number: int) -> Hold:
    """Make and lock the file of an act; raise LocalResourceError if that fails."""
    path = folder / f"{number}.lock"
    try:
        make_private_folder(folder)
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        message = f"The lock `{path}` of an act cannot be made: {error.strerror}"
        raise LocalResourceError(message, hint=disk_advice(error)) from error
    return Hold(path, file)


def _is_locked(folder: Path, number: int) -> bool:
    """Whether a running process holds the lock of an act; a stale file is removed."""
    path = folder / f"{number}.lock"
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


class Store:
    """The registry: one sqlite file in WAL mode, safe for several commands at once."""

    def __init__(
        self,
        path: Path,
        *,
        unrecorded: Callable[[str], None] | None = None,
        scratch_dirs: Sequence[Path] = (),
    ) -> None:
        """Open the registry, or make it.

        Args:
            path: The file.
            unrecorded: Called with the reason if nothing can be written; the registry is then only
                read, and acts continue without a record. None makes that an error.
            scratch_dirs: Folders for a copy of a registry that cannot be read in its own.

        Raises:
            LocalResourceError: If it cannot be opened.
        """
        self.path = path
        self._unrecorded = unrecorded
        try:
            self._connection = self._open()
        except LocalResourceError as error:
            if unrecorded is None or not path.is_file():
                raise
            self._connection = self._load(scratch_dirs)
            unrecorded(error.message)

    def _open(self) -> sqlite3.Connection:
        try:
            make_private_folder(self.path.parent)
            create_private(self.path)
            connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        except OSError as error:
            raise self._no_place(error) from error
        except sqlite3.Error as error:
            raise _refusal(self.path, error) from error
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            self._prepare(connection)
        except sqlite3.Error as error:
            connection.close()
            raise _refusal(self.path, error) from error
        except LocalResourceError:
            connection.close()
            raise
        return connection

    def _no_place(self, error: OSError) -> LocalResourceError:
        message = f"The registry `{self.path}` cannot be opened: {error}"
        # Another folder knows no runs, so it is named only where there are none to lose.
        other = "name another folder with `NSA_OPS_STATE_DIR`"
        hint = EMERGENCY if self.path.is_file() else other
        return LocalResourceError(message, hint=f"{disk_advice(error)}; {hint}")

    def _load(self, scratch_dirs: Sequence[Path]) -> sqlite3.Connection:
        try:
            connection = load_registry(self.path, scratch_dirs)
            self._prepare(connection)
            connection.execute("PRAGMA query_only=ON")
        except sqlite3.Error as error:
            raise _refusal(self.path, error) from error
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables of this version where they are missing."""
        version = read_version(connection)
        newer = describe_newer(version)
        if newer:
            message = f"The registry `{self.path}` {newer}"
            raise LocalResourceError(message, hint=UPDATE)
        write_tables(connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an error of sqlite into one of ours: disk full, locked, or damaged."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, ValidationError) as error:
            raise _refusal(self.path, error) from error

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> int:
        """Change something; the number of the new row, or 0 if it could not be recorded."""
        try:
            with self._errors():
                return int(self._connection.execute(statement, values).lastrowid or 0)
        except LocalResourceError as error:
            if self._unrecorded is None:
                raise
            self._unrecorded(error.message)
            return 0

    def _insert(self, table: str, record: Any, *, replace: bool) -> None:
        values = asdict(record)
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        statement = f"{verb} INTO {table} ({names}) VALUES ({marks})"
        self._execute(statement, tuple(values.values()))

    def _select(
        self, kind: type[RecordT], table: str, tail: str = "", values: tuple[Any, ...] = ()
    ) -> list[RecordT]:
        names = ", ".join(field.name for field in fields(kind))
        statement = f"SELECT {names} FROM {table} {tail}"  # noqa: S608 (names are ours)
        with self._errors():
            rows = self._connection.execute(statement, values).fetchall()
            return [_record_of(kind, table, row) for row in rows]

    def add_pod(self, pod: PodRecord) -> None:
        """Add a pod.

        Raises:
            sqlite3.IntegrityError: If the name is taken.
        """
        self._insert("pods", pod, replace=False)

    def replace_pod(self, pod: PodRecord) -> None:
        """Change what is known of a pod."""
        self._insert("pods", pod, replace=True)

    def pods(self) -> list[PodRecord]:
        """All pods by name."""
        return self._select(PodRecord, "pods", "ORDER BY name")

    def find_pod(self, name: str) -> PodRecord | None:
        """A pod by name."""
        found = self._select(PodRecord, "pods", "WHERE name = ?", (name,))
        return found[0] if found else None

    def remove_pod(self, name: str) -> None:
        """Forget a pod; nothing on it changes."""
        self._execute("DELETE FROM pods WHERE name = ?", (name,))

    def save_run(self, run: RunRecord) -> None:
        """Remember a run, or replace what is known of it."""
        self._insert("runs", run, replace=True)

    def runs(self, pod: str | None = None) -> list[RunRecord]:
        """Runs, newest first; if a pod is named, those that it takes part in."""
        found = self._select(RunRecord, "runs", "ORDER BY launched_unix_s DESC, run_id DESC")
        return [run for run in found if pod is None or pod in {one.pod for one in run.members}]

    def find_run(self, run_id: str) -> RunRecord | None:
        """A run by id."""
        found = self._select(RunRecord, "runs", "WHERE run_id = ?", (run_id,))
        return found[0] if found else None

    def save_report(self, sha256: str, report: Report) -> None:
        """Keep a preflight report."""
        row = (sha256, report.pod_id, report.code_id, report.profile, report.at)
        self._execute(
            "INSERT OR REPLACE INTO reports VALUES (?, ?, ?, ?, ?, ?)",
            (*row, report.model_dump_json()),
        )

    def newest_report(self, pod_id: str, code_id: str, profile: str) -> tuple[str, Report] | None:
        """The newest report that holds for this pod, code and profile, with its hash."""
        statement = (
            "SELECT sha256, content FROM reports WHERE pod_id = ? AND code_id = ? AND profile = ? "
            "ORDER BY at DESC LIMIT 1"
        )
        with self._errors():
            row = self._connection.execute(statement, (pod_id, code_id, profile)).fetchone()
            return (row[0], Report.model_validate_json(row[1])) if row else None

    def save_receipt(self, receipt: Receipt) -> None:
        """Keep a backup receipt."""
        self._insert("receipts", receipt, replace=True)

    def receipts(self, run_id: str | None = None) -> list[Receipt]:
        """Backup receipts, highest step first; of one run if named."""
        if run_id is None:
            return self._select(Receipt, "receipts", "ORDER BY run_id, step DESC")
        return self._select(
            Receipt,
            "receipts",
            "WHERE run_id = ? ORDER BY step DESC, pulled_unix_s DESC",
            (run_id,),
        )

    def save_provision(self, pod_id: str, at: float, content: str) -> None:
        """Keep the receipt of a pod's provisioning, instead of an older one."""
        self._execute("INSERT OR REPLACE INTO provisions VALUES (?, ?, ?)", (pod_id, at, content))

    def provision(self, pod_id: str) -> str:
        """The receipt of a pod's provisioning as it was kept; empty if there is none."""
        statement = "SELECT content FROM provisions WHERE pod_id = ?"
        with self._errors():
            row = self._connection.execute(statement, (pod_id,)).fetchone()
        return str(row[0]) if row else ""

    def remove_receipt(self, run_id: str, step: int, path: str) -> None:
        """Forget a receipt whose checkpoint was removed."""
        statement = "DELETE FROM receipts WHERE run_id = ? AND step = ? AND path = ?"
        self._execute(statement, (run_id, step, path))

    @contextmanager
    def intent(self, act: str, subject: str, **detail: object) -> Iterator[int]:
        """Record an act before it is done in the block, and how it ended afterwards.

        The intent stays open where the outcome is unknown: the process was killed in the block,
        lost the link, or got Ctrl-C. `reconcile` checks it, or the same act done later closes it.
        """
        number = self.leave_open(act, subject, **detail)
        hold = self._hold(number)
        try:
            yield number
        except (PodUnreachableError, DeadlineError, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.end_intent(number, f"{type(error).__name__}: {error}")
            raise
        else:
            self.end_intent(number, "done")
            self._end_earlier(act, subject, number)
        finally:
            if hold is not None:
                hold.release()

    def _hold(self, number: int) -> Hold | None:
        """Lock a recorded act; None for one that could not be recorded or locked."""
        if not number:
            return None
        try:
            return _take_hold(self._holds, number)
        except LocalResourceError as error:
            if self._unrecorded is None:
                raise
            self._unrecorded(error.message)
            return None

    @property
    def _holds(self) -> Path:
        return self.path.parent / "intents"

    def leave_open(self, act: str, subject: str, **detail: object) -> int:
        """Record an act that has to be checked later, redacted; its number."""
        kept = {
            key: redact(value) if isinstance(value, str) else value for key, value in detail.items()
        }
        return self._execute(
            "INSERT INTO intents (at, act, subject, detail) VALUES (?, ?, ?, ?)",
            (time.time(), act, subject, json.dumps(kept, default=str)),
        )

    def end_intent(self, number: int, outcome: str) -> None:
        """Record how an act ended; nothing for one that was not recorded."""
        if not number:
            return
        self._execute(
            "UPDATE intents SET ended_unix_s = ?, outcome = ? WHERE id = ?",
            (time.time(), redact(outcome), number),
        )

    def _end_earlier(self, act: str, subject: str, number: int) -> None:
        """End earlier, interrupted intents of the same act."""
        for intent in self.open_intents():
            same = (intent.act, intent.subject) == (act, subject)
            if same and intent.id < number and not self.is_held(intent):
                self.end_intent(intent.id, f"done by {number}")

    def intents(self, act: str, subject: str) -> list[Intent]:
        """All intents of an act on a subject, ended or not, oldest first."""
        return self._select(
            Intent, "intents", "WHERE act = ? AND subject = ? ORDER BY id", (act, subject)
        )

    def open_intents(self) -> list[Intent]:
        """Acts without an end, oldest first."""
        return self._select(Intent, "intents", "WHERE ended_unix_s IS NULL ORDER BY id")

    def is_held(self, intent: Intent) -> bool:
        """Whether the command that wrote an intent still runs."""
        return _is_locked(self._holds, intent.id)
