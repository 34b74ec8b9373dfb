"""What transports over a network share: framed calls, copies of whole files, and error cases."""

import math
import os
import secrets
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from nsa_core.rundir.atomic import fsync_dir
from nsa_core.rundir.checkpoint import hash_file
from nsa_core.rundir.names import beside
from nsa_ops.errors import (
    DeadlineError,
    NotFoundError,
    OpsError,
    PodUnreachableError,
    StateConflictError,
)
from nsa_ops.remote import frame, pod_files
from nsa_ops.remote.frame import Framed, FramedAnswer, encode_call
from nsa_ops.remote.pump import BEGIN_S, Outcome
from nsa_ops.remote.transport import (
    MAX_OUTPUT_BYTES,
    Ceiling,
    Completed,
    OversizeError,
    Transport,
    last_line,
    shorten,
)

_PIECE_BYTES = 2**18
_KILL_S = 5.0


class AnswerLostError(PodUnreachableError):
    """The link ended after the command began and before its answer: it may have run to its end."""


@dataclass(frozen=True)
class Ended:
    """How an exchange ended; `status` is that of the far side or of ssh, None if there was none."""

    status: int | None
    outcome: Outcome


class FramedTransport(Transport):
    """The contract of `Transport` on top of one exchange of bytes with `sh` on the pod.

    Attributes:
        longest_s: No call may take longer, whatever it asks for.
    """

    longest_s: float = math.inf

    @property
    @abstractmethod
    def where(self) -> str:
        """The pod in words."""

    @abstractmethod
    def _exchange(self, pieces: Iterable[bytes], answer: FramedAnswer, timeout_s: float) -> Ended:
        """Start `BOOTSTRAP` on the pod, send the pieces, feed both streams of the answer."""

    @abstractmethod
    def _explain(self, ended: Ended, said: str) -> OpsError:
        """The error for a command that never began, from the words of the link."""

    def run_into(
        self,
        argv: Sequence[str],
        sink: Callable[[bytes], object],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        max_bytes: int,
    ) -> Completed:
        """Run a command whose stdout goes to a sink as it arrives."""
        bounded = Ceiling(sink, max_bytes, f"`{shorten(argv)}` on {self.where}")
        return self._call(argv, _cut(stdin), bounded, timeout_s)

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        """Copy a file to the pod: hashed there, then renamed over the target."""
        if not source.is_file():
            message = f"`{source}` does not exist"
            raise NotFoundError(message)
        path = PurePosixPath(target)
        part = path.with_name(beside(path.name, f".{secrets.token_hex(4)}"))
        facts = source.stat()
        argv = pod_files.put_command(
            str(path.parent), target, str(part),
            size=facts.st_size, sha256=hash_file(source), mode=facts.st_mode & 0o777,
        )  # fmt: skip
        with source.open("rb") as file:
            none = Ceiling(_drop, MAX_OUTPUT_BYTES, f"`{target}` on {self.where}")
            done = self._call(argv, _read(file), none, timeout_s)
        pod_files.check(done, target, self.where)

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        """Copy a file from the pod: hashed on both ends, then renamed over the target."""
        if not target.parent.is_dir():
            message = f"`{target.parent}` is not a folder"
            raise NotFoundError(message)
        prefix = f".{target.name}."
        with tempfile.NamedTemporaryFile(prefix=prefix, dir=target.parent, delete=False) as file:
            part = Path(file.name)
            try:
                free_bytes = shutil.disk_usage(target.parent).free
                arriving = pod_files.Arriving(file.write, max_bytes=free_bytes)
                done = self._call(pod_files.get_command(source), (), arriving.feed, timeout_s)
                pod_files.check(done, source, self.where)
                file.flush()
                arriving.verify(source)
                os.fchmod(file.fileno(), arriving.mode)
                os.fsync(file.fileno())
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        fsync_dir(target.parent)

    def stream(
        self,
        path: str,
        offset: int,
        sink: Callable[[bytes], object],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """Bytes of a file from an offset on, as they arrive."""
        argv = pod_files.tail_command(path, offset, max_bytes)
        bounded = Ceiling(sink, max_bytes, f"`{path}` on {self.where}")
        pod_files.check(self._call(argv, (), bounded, timeout_s), path, self.where)

    def _call(
        self,
        argv: Sequence[str],
        stdin: Iterable[bytes],
        sink: Callable[[bytes], object],
        timeout_s: float,
        *,
        is_last: bool = False,
    ) -> Completed:
        """One framed exchange; stdout goes to the sink as it arrives.

        Args:
            argv: The command.
            stdin: What it is given.
            sink: Takes its stdout.
            timeout_s: Deadline.
            is_last: No other call is made where this one has to be ended there.
        """
        timeout_s = timeout_s if is_last else min(timeout_s, self.longest_s)
        nonce = secrets.token_hex(16)
        line = encode_call(argv, nonce)
        errors = bytearray()
        bounded = Ceiling(errors.extend, MAX_OUTPUT_BYTES, f"`{shorten(argv)}` on {self.where}")
        answer = FramedAnswer(Framed(nonce, sink), Framed(nonce, bounded))
        try:
            ended = self._exchange(_after(line, stdin), answer, timeout_s)
        except OversizeError:
            self._kill(None if is_last else answer.pid)
            raise
        except KeyboardInterrupt as stop:
            stop.add_note(self._stopped(argv, answer))
            raise
        if answer.is_whole:
            code = self._exit_code(argv, answer.out.ending or "")
            return Completed(tuple(argv), code, b"", bytes(errors))
        raise self._no_ending(argv, answer, ended, timeout_s, is_last=is_last)

    def _kill(self, pid: int | None) -> str:
        """End what a call has started; says what is left if that cannot be done.

        A pod that answers no call in time answers this one neither, so it is the last one.
        """
        if pid is None:
            return ""
        argv = ("sh", "-c", frame.KILL, "sh", str(pid))
        nothing = Ceiling(_drop, MAX_OUTPUT_BYTES, f"`kill` on {self.where}")
        try:
            done = self._call(argv, (), nothing, _KILL_S, is_last=True)
        except OpsError as error:
            return f", and may still run there as process {pid} ({error.message})"
        return "" if done.exit_code == 0 else f", and may still run there as process {pid}"

    def _stopped(self, argv: Sequence[str], answer: FramedAnswer) -> str:
        """What came of a call that Ctrl-C has cut off: it is ended there, as at a deadline."""
        command = f"`{shorten(argv)}` on {self.where}"
        if answer.pid is None:
            return f"it is unknown whether {command} had begun"
        try:
            left = self._kill(answer.pid)
        except KeyboardInterrupt:  # asked for twice: leave at once
            left = f", and may still run there as process {answer.pid}"
        return f"{command} was cut off{left}" if left else f"{command} was ended"

    def _exit_code(self, argv: Sequence[str], ending: str) -> int:
        if ending == frame.MISSING:
            message = f"`{argv[0]}` does not exist on {self.where}"
            raise NotFoundError(message)
        if ending == frame.NOT_EXECUTABLE:
            message = f"`{argv[0]}` cannot be executed on {self.where}"
            raise StateConflictError(message, hint=f"See `ls -l {argv[0]}` there")
        return int(ending)

    def _no_ending(
        self,
        argv: Sequence[str],
        answer: FramedAnswer,
        ended: Ended,
        timeout_s: float,
        *,
        is_last: bool,
    ) -> OpsError:
        command = shorten(argv)
        if ended.outcome == "silent":
            kind = AnswerLostError if answer.has_begun else PodUnreachableError
            message = f"{self.where} has not answered for {BEGIN_S:g} s"
            return kind(message, hint="A run there continues without us")
        if ended.outcome == "late":
            left = self._kill(None if is_last else answer.pid)
            message = f"`{command}` did not end within {timeout_s:g} s on {self.where}{left}"
            return DeadlineError(message, hint="Give it longer with `--timeout`")
        if answer.has_begun:
            words = f": {last_line(answer.noise)}" if answer.noise else ""
            message = (
                f"The link to {self.where} ended in the middle of the answer to `{command}`{words}"
            )
            hint = "It may have run to its end there: check the state before you repeat it"
            return AnswerLostError(message, hint=hint)
        return self._explain(ended, answer.noise)


def _drop(_piece: bytes) -> None:
    """Take bytes that nobody wants."""


def _cut(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]


def _read(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _after(line: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield line
    yield from rest
