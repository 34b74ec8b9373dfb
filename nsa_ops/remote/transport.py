"""Transport: the one door to a pod, whatever lies between (this machine, OpenSSH, Fabric)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: Deadline of a command that answers at once on a healthy pod.
QUICK_S = 30.0


@dataclass(frozen=True)
class Completed:
    """A command that ran to its end on the pod.

    Attributes:
        argv: The command.
        exit_code: Its exit code; 128 + signal if a signal ended it.
        stdout: Its output, unchanged bytes.
        stderr: Its errors, unchanged bytes.
    """

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Output as text; bytes that are not UTF-8 are shown as replacement characters."""
        return self.stdout.decode(errors="replace")

    @property
    def last_error_line(self) -> str:
        """Last line of stderr that says something; empty if none does."""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


class Transport(Protocol):
    """Run a command on a pod and move bytes; every call has a deadline.

    A command is an argument list and is never joined into a shell line by the caller. Secrets go
    through `stdin`, never through `argv`.
    """

    @property
    def where(self) -> str:
        """The pod in words, for messages: `this machine` or `user@host:port`."""
        ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end.

        Raises:
            DeadlineError: If it did not end in time; its process group is then killed.
            PodUnreachableError: If the pod could not be asked.
            NotFoundError: If the program does not exist there.
        """
        ...

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        """Copy a file to an absolute path on the pod, whole or not at all.

        Raises:
            NotFoundError: If the source or the target's folder does not exist.
            DeadlineError, PodUnreachableError: As in `run`.
        """
        ...

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        """Copy a file from the pod, whole or not at all; an existing target stays until then.

        Raises:
            NotFoundError: If the source does not exist.
            DeadlineError, PodUnreachableError: As in `run`.
        """
        ...

    def stream(
        self,
        path: str,
        offset: int,
        sink: Callable[[bytes], object],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """Give the bytes of a file from an offset on to a sink as they arrive.

        What the sink has been given before an error are bytes of the file, in order.

        Raises:
            NotFoundError: If the file does not exist.
            DeadlineError, PodUnreachableError: As in `run`.
        """
        ...

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        """Bytes of a file from an offset on, at most `max_bytes`; empty at its end.

        Raises:
            NotFoundError: If the file does not exist.
            DeadlineError, PodUnreachableError: As in `run`.
        """
        ...
