"""Holds: a locked file for each act under way, so that a killed command is told from a busy one."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nsa_core.config.base import disk_advice
from nsa_ops.errors import LocalResourceError
from nsa_ops.private import make_private_folder


@dataclass(frozen=True)
class Hold:
    """The lock of one act; the kernel gives it back when the process ends, however it ends."""

    path: Path
    file: IO[bytes]

    def release(self) -> None:
        """Give it back; a file that somebody else has removed is as good."""
        self.path.unlink(missing_ok=True)
        self.file.close()


def take_hold(folder: Path, number: int) -> Hold:
    """Lock the file of an act.

    Raises:
        LocalResourceError: If it cannot be made.
    """
    path = folder / f"{number}.lock"
    try:
        make_private_folder(folder)
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        message = f"The lock `{path}` of an act cannot be made: {error.strerror}"
        raise LocalResourceError(message, hint=disk_advice(error)) from error
    return Hold(path, file)


def is_held(folder: Path, number: int) -> bool:
    """Whether a living process holds the lock of an act; what a dead one left is removed."""
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
