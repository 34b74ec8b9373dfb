"""The registry's file: its tables, their versions, and how to read it without write access."""

import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

_JOURNAL = "-wal"
UPDATE = "Update nsa-ops on this machine"
_SCHEMA_VERSION = 3
#: Columns that an older version did not have: table, name, type and default.
_ADDED = (
    ("pods", "address", "TEXT NOT NULL DEFAULT ''"),  # schema 1 knew only pods of this machine
    ("runs", "pod_id", "TEXT NOT NULL DEFAULT ''"),
    ("runs", "attempt", "INTEGER NOT NULL DEFAULT 0"),
    ("runs", "attempt_id", "TEXT NOT NULL DEFAULT ''"),
    ("runs", "other_pods", "TEXT NOT NULL DEFAULT ''"),  # schema 2 knew runs of one pod only
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pods (
  name TEXT PRIMARY KEY, pod_id TEXT NOT NULL, kind TEXT NOT NULL, root TEXT NOT NULL,
  python TEXT NOT NULL, profile TEXT NOT NULL, added_unix_s REAL NOT NULL,
  address TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS runs (
  run_id TEXT PRIMARY KEY, pod TEXT NOT NULL, recipe TEXT NOT NULL, profile TEXT NOT NULL,
  code_id TEXT NOT NULL, config_sha256 TEXT NOT NULL, launched_unix_s REAL NOT NULL,
  pod_id TEXT NOT NULL DEFAULT '', attempt INTEGER NOT NULL DEFAULT 0,
  attempt_id TEXT NOT NULL DEFAULT '', other_pods TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS reports (
  sha256 TEXT PRIMARY KEY, pod_id TEXT NOT NULL, code_id TEXT NOT NULL, profile TEXT NOT NULL,
  at REAL NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS receipts (
  run_id TEXT NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL, total_bytes INTEGER NOT NULL,
  manifest_sha256 TEXT NOT NULL, pulled_unix_s REAL NOT NULL, verified_unix_s REAL NOT NULL,
  PRIMARY KEY (run_id, step, path));
CREATE TABLE IF NOT EXISTS provisions (
  pod_id TEXT PRIMARY KEY, at REAL NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS intents (
  id INTEGER PRIMARY KEY, at REAL NOT NULL, act TEXT NOT NULL, subject TEXT NOT NULL,
  detail TEXT NOT NULL, ended_unix_s REAL, outcome TEXT);
"""


def read_version(connection: sqlite3.Connection) -> int:
    """Version of the tables; 0 where there are none yet."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def describe_newer(version: int) -> str:
    """Why tables of a version cannot be used; empty if they can."""
    if version <= _SCHEMA_VERSION:
        return ""
    return f"was written by a newer nsa-ops (schema {version}, this one reads {_SCHEMA_VERSION})"


def write_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of this version where they are missing."""
    version = read_version(connection)
    connection.executescript(_SCHEMA)
    _add_columns(connection)
    if version != _SCHEMA_VERSION:
        connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")


def _add_columns(connection: sqlite3.Connection) -> None:
    """Give the tables of an older version the columns that were added since."""
    for table, name, kind in _ADDED:
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if name not in columns:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")


def load_registry(path: Path, scratch_dirs: Sequence[Path]) -> sqlite3.Connection:
    """A copy of the registry in memory, including what is only in its journal.

    To read a registry in WAL mode, sqlite has to write a file beside it. Where it cannot, a
    registry without a journal is read as it is, and one with a journal is copied first.

    Args:
        path: The registry.
        scratch_dirs: Folders for a temporary copy, the best first.

    Raises:
        sqlite3.Error: If it cannot be read in any way.
    """
    address = path.absolute().as_uri()
    try:
        return _in_memory(f"{address}?mode=ro")
    except sqlite3.OperationalError as error:
        # Copying a registry that is in use would drop the locks that this process has of it.
        if error.sqlite_errorcode in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            raise
        journal = path.with_name(path.name + _JOURNAL)
        if not journal.exists() or not journal.stat().st_size:
            return _in_memory(f"{address}?immutable=1")
        return _from_copy(path, journal, scratch_dirs)


def _in_memory(address: str) -> sqlite3.Connection:
    with closing(sqlite3.connect(address, uri=True)) as file:
        copy = sqlite3.connect(":memory:", isolation_level=None)
        try:
            file.backup(copy)
        except sqlite3.Error:
            copy.close()
            raise
    return copy


def _from_copy(path: Path, journal: Path, scratch_dirs: Sequence[Path]) -> sqlite3.Connection:
    problem = "no folder for a copy of it can be written"
    for scratch in scratch_dirs:
        try:
            with tempfile.TemporaryDirectory(prefix="nsa-ops-", dir=scratch) as folder:
                copy = Path(folder) / path.name
                shutil.copyfile(path, copy)
                shutil.copyfile(journal, copy.with_name(copy.name + _JOURNAL))
                return _in_memory(copy.as_uri())
        except (OSError, sqlite3.OperationalError) as error:
            problem = str(error)
    message = f"it has a journal that cannot be read beside it: {problem}"
    raise sqlite3.OperationalError(message)
