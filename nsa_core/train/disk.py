"""Writes that a full disk may refuse: lines of telemetry and of the log, never the run's end."""

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from nsa_core.rundir.atomic import append_line, fsync_dir
from nsa_core.rundir.layout import RunDir

RESERVE_BYTES = 65_536


class LossyWrites:
    """Tries to write; a line that the disk refuses is counted, and the first one is reported."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self.num_lost = 0

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Run `write`; False if the operating system refused."""
        try:
            write()
        except OSError as error:
            with self._lock:
                self.num_lost += 1
                is_first = self.num_lost == 1
            if is_first:
                self._report(f"warning: {what} could not be written: {error}; the run continues")
            return False
        return True


def hold_reserve(run: RunDir) -> None:
    """Occupy a few blocks that `release_reserve` gives back; OSError if even they find no room."""
    if run.reserve.exists() and run.reserve.stat().st_size == RESERVE_BYTES:
        return
    run.reserve.write_bytes(b"\x55" * RESERVE_BYTES)


def release_reserve(run: RunDir) -> None:
    """Give the blocks back, so that exit.json and the last event find room."""
    run.reserve.unlink(missing_ok=True)
    fsync_dir(run.root)


STDERR = 2


class RunLog:
    """Writes lines to stderr and to training.log, whether or not the runner joins the two.

    Attributes:
        num_refused: Lines that stderr refused; nothing is left to report them on.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path = path
        self._prefix = prefix
        self.num_refused = 0

    def report(self, line: str) -> None:
        """One line for people, on stderr and in the log, after the prefix."""
        line = self._prefix + line
        self._print(line)
        if not self._stderr_is_log():
            self._append(line)

    def keep(self, text: str) -> None:
        """Text for the log alone, such as the traceback of a bug."""
        self._append(text.rstrip("\n"))

    def _append(self, text: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        try:
            append_line(self._path, f"{stamp} {text}")
        except OSError as error:
            self._print(f"warning: {self._path.name} could not be written: {error}")

    def _print(self, line: str) -> None:
        """Write to stderr past Python's buffer; stderr may be a file on a disk that is full."""
        try:
            os.write(STDERR, f"{line}\n".encode())
        except OSError:
            self.num_refused += 1

    def _stderr_is_log(self) -> bool:
        try:
            return os.path.samestat(os.fstat(STDERR), self._path.stat())
        except OSError:
            return False
