"""One line for people on stderr, everything in training.log, nothing twice."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path


class RunLog:
    """Writes lines to stderr and to training.log, whether or not the runner joins the two."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, line: str) -> None:
        """One line for people."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        if not self._stderr_is_log():
            self._append(line)

    def keep(self, text: str) -> None:
        """Text for the log alone, such as the traceback of a bug."""
        self._append(text.rstrip("\n"))

    def _append(self, text: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        try:
            with self._path.open("a") as file:
                file.write(f"{stamp} {text}\n")
        except OSError as error:
            sys.stderr.write(f"warning: {self._path.name} could not be written: {error}\n")

    def _stderr_is_log(self) -> bool:
        try:
            return os.path.samestat(os.fstat(sys.stderr.fileno()), self._path.stat())
        except (OSError, ValueError):
            return False
