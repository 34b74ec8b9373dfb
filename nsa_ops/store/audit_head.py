"""The head of the audit log's chain, kept in the registry, apart from the log that it protects."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.base import disk_advice
from nsa_ops.errors import LocalResourceError
from nsa_ops.local_files import create_private
from nsa_ops.remote.audit import Head
from nsa_ops.store.database import load_registry
from nsa_ops.store.registry import registry_advice

_BUSY_S = 10.0
_SELECT = "SELECT lines, bytes, sha256 FROM audit_head WHERE log = ?"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit_head (
  log TEXT PRIMARY KEY, lines INTEGER NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL);
"""


@dataclass(frozen=True)
class AuditHead:
    """The last entry of the log of this registry; each call opens the registry for itself.

    The writer of a log locks it, so there is never a second one here.
    """

    registry: Path
    scratch_dirs: Sequence[Path] = ()
    log: str = "audit.jsonl"

    def read(self) -> Head | None:
        """The recorded head; None if there is none, as in a registry of an older version.

        Raises:
            LocalResourceError: If the registry cannot be read.
        """
        if not self.registry.is_file():
            return None
        try:
            with closing(self._open()) as registry:
                row = registry.execute(_SELECT, (self.log,)).fetchone()
        except sqlite3.Error as error:
            if "no such table" in str(error):
                return None
            raise self._refusal(error, "read") from error
        if row is None:
            return None
        if [type(cell) for cell in row] != [int, int, str]:
            raise self._refusal(sqlite3.DatabaseError(f"it holds {row!r:.80}"), "read")
        return Head(*row)

    def _open(self) -> sqlite3.Connection:
        """Open the registry to read, also where its folder cannot be written."""
        registry = self._connect("ro")
        try:
            registry.execute("PRAGMA schema_version").fetchone()
        except sqlite3.OperationalError:
            registry.close()
            return load_registry(self.registry, self.scratch_dirs)
        return registry

    def write(self, head: Head) -> None:
        """Record the head; raise LocalResourceError if the registry cannot be written."""
        row = (self.log, head.lines, head.bytes, head.sha256)
        try:
            create_private(self.registry)
            with closing(self._connect("rw")) as registry:
                # A head that a power cut takes back is behind the log, which is no contradiction.
                registry.execute("PRAGMA synchronous=NORMAL")
                registry.executescript(_SCHEMA)
                registry.execute("INSERT OR REPLACE INTO audit_head VALUES (?, ?, ?, ?)", row)
        except (OSError, sqlite3.Error) as error:
            raise self._refusal(error, "record") from error

    def _connect(self, mode: str) -> sqlite3.Connection:
        address = f"{self.registry.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(address, uri=True, timeout=_BUSY_S, isolation_level=None)

    def _refusal(self, error: OSError | sqlite3.Error, verb: str) -> LocalResourceError:
        message = f"The registry `{self.registry}` cannot {verb} the audit log's head: {error}"
        advice = disk_advice(error) if isinstance(error, OSError) else registry_advice(error)
        return LocalResourceError(message, hint=advice)
