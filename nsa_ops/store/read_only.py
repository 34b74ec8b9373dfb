"""Read a registry whose folder takes no write: what it holds, in memory."""

import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

_JOURNAL = "-wal"


def load_registry(path: Path, scratch_dirs: Sequence[Path]) -> sqlite3.Connection:
    """A copy of the registry in memory, with what stands in its journal only.

    sqlite reads a registry in WAL mode beside two more files, and has to write one of them. Where
    it cannot, a registry without a journal is whole in itself; one with a journal is copied.

    Args:
        path: The registry.
        scratch_dirs: Folders for a copy that lives for an instant, the best first.

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
    problem = "no folder for a copy of it takes a write"
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
