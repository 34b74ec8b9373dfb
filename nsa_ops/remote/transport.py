"""Transport: the only way to a pod, whatever lies between (this machine, OpenSSH, Fabric)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nsa_ops.errors import VerificationError

#: Deadline of a command that answers at once on a healthy pod.
QUICK_S = 30.0
#: Ceiling of a command that answers with a few lines, or with none.
MAX_ANSWER_BYTES = 2**20
#: Ceiling of each stream of a command: reports of agents are the largest, with some MiB.
MAX_OUTPUT_BYTES = 16 * 2**20
#: Ceiling of listings and of manifests of a run, 100,000 files of 300 bytes.
MAX_LISTING_BYTES = 64 * 2**20
_MAX_SHOWN = 80


class OversizeError(VerificationError):
    """The pod sent more than was asked for, or more than any answer of that kind has."""


class Ceiling:
    """A sink that passes on a limited number of bytes and refuses the rest.

    Attributes:
        num_bytes: Bytes that arrived.
    """

    def __init__(self, sink: Callable[[bytes], object], max_bytes: int, what: str) -> None:
        self._sink = sink
        self._max_bytes = max_bytes
        self._what = what
        self.num_bytes = 0

    def __call__(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            OversizeError: If they are more than the ceiling allows.
        """
        room = self._max_bytes - self.num_bytes
        self.num_bytes += len(piece)
        if len(piece) > room:
            self._sink(piece[: max(0, room)])
            message = (
                f"{self._what} sent {self.num_bytes} bytes or more; the limit is {self._max_bytes}"
            )
            raise OversizeError(message, hint="The pod does not answer as expected: check it")
        self._sink(piece)


@dataclass(frozen=True)
class Completed:
    """A command that ran to its end; its exit code is 128 + signal if a signal ended it."""

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
        return last_line(self.stderr.decode(errors="replace"))


class Transport(Protocol):
    """Run a command on a pod and move bytes; every call has a deadline.

    A command is an argument list and is never joined into a shell line by the caller. Secrets go
    through `stdin`, never through `argv`. `run` and `tail` collect what `run_into` and `stream`
    hand to a sink as it arrives.
    """

    @property
    def where(self) -> str:
        """The pod in words, for messages: `this machine` or `user@host:port`."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:
        """Run a command to its end.

        Args:
            argv: The command.
            stdin: What it is given.
            timeout_s: Deadline.
            max_bytes: Ceiling of stdout; that of stderr is `MAX_OUTPUT_BYTES`.

        Raises:
            DeadlineError: If it did not end in time; its process group is then killed.
            OversizeError: If it printed more than its ceiling; its process group is then killed.
            PodUnreachableError: If the pod could not be asked.
            NotFoundError: If the program does not exist there.
        """
        output = bytearray()
        done = self.run_into(
            argv, output.extend, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
        )
        return Completed(tuple(argv), done.exit_code, bytes(output), done.stderr)

    def run_into(
        self,
        argv: Sequence[str],
        sink: Callable[[bytes], object],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        max_bytes: int,
    ) -> Completed:
        """Run a command whose stdout goes to a sink as it arrives; errors as in `run`."""
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
            OversizeError: If more arrived than `max_bytes`; the sink has not seen that.
            DeadlineError, PodUnreachableError: As in `run`.
        """
        ...

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        """Bytes of a file from an offset on, at most `max_bytes`; empty at its end.

        Raises:
            NotFoundError: If the file does not exist.
            DeadlineError, PodUnreachableError: As in `run`.
        """
        content = bytearray()
        self.stream(path, offset, content.extend, max_bytes=max_bytes, timeout_s=timeout_s)
        return bytes(content)


def shorten(argv: Sequence[str]) -> str:
    """A command in one short line, for messages."""
    line = " ".join(" ".join(argv).split())
    return line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 1] + "…"


def last_line(text: str) -> str:
    """Last line that is not blank; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
