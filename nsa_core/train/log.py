"""One line for people on stderr, everything in training.log, nothing twice."""

import os
from datetime import UTC, datetime
from pathlib import Path

from nsa_core.rundir.atomic import append_line

STDERR = 2


class RunLog:
    """Writes lines to stderr and to training.log, whether or not the runner joins the two.

    Attributes:
        num_unsaid: Lines that stderr refused; there is nowhere left to say so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_unsaid = 0

    def tell(self, line: str) -> None:
        """One line for people."""
        self._say(line)
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
            self._say(f"warning: {self._path.name} could not be written: {error}")

    def _say(self, line: str) -> None:
        """Write to stderr past Python's buffer; stderr may be a file on a disk that is full."""
        try:
            os.write(STDERR, f"{line}\n".encode())
        except OSError:
            self.num_unsaid += 1

    def _stderr_is_log(self) -> bool:
        try:
            return os.path.samestat(os.fstat(STDERR), self._path.stat())
        except OSError:
            return False
