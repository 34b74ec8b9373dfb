"""Run a program of this machine: feed it, drain both of its streams at once, within a deadline."""

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Literal, Protocol

#: Seconds until the far side must have begun: a link may be dead though nothing has ended it.
BEGIN_S = 18.0
_READ_BYTES = _PIPE_BYTES = 2**20
_END_S = 1.0
_REAP_S = 5.0

Outcome = Literal["ended", "late", "silent"]


class Answer(Protocol):
    """How far an answer has come."""

    @property
    def has_begun(self) -> bool:
        """The far side runs what it was asked to."""
        ...

    @property
    def is_whole(self) -> bool:
        """Nothing more is to be expected."""
        ...


def pump(
    process: subprocess.Popen[bytes],
    pieces: Iterable[bytes],
    feeds: tuple[Callable[[bytes], None], Callable[[bytes], None]],
    answer: Answer,
    timeout_s: float,
) -> Outcome:
    """Move bytes until both streams end, the answer is whole, or a deadline passes.

    Args:
        process: Child with pipes for all three streams; its pipes are closed by `end_process`.
        pieces: What it is given; a child that stops reading is no error.
        feeds: Take the pieces of stdout and of stderr.
        answer: How far the answer is; the streams may be held open after it.
        timeout_s: Deadline of the whole; it has to begin within `BEGIN_S`.
    """
    began_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for stream, feed in zip((process.stdout, process.stderr), feeds, strict=True):
            _register(selector, stream, selectors.EVENT_READ, feed)
        writer = _Writer(pieces)
        _register(selector, process.stdin, selectors.EVENT_WRITE, writer)
        while _is_reading(selector) and not answer.is_whole:
            limit_s = timeout_s if answer.has_begun else min(timeout_s, BEGIN_S)
            left_s = began_s + limit_s - time.monotonic()
            if left_s <= 0:
                return "late" if limit_s == timeout_s else "silent"
            for key, _ in selector.select(left_s):
                if not (_write if key.data is writer else _read)(key.fd, key.data):
                    selector.unregister(key.fileobj)
                    if key.data is writer:
                        close_quietly(process.stdin)
    return "ended"


def _register(
    selector: selectors.BaseSelector, stream: IO[bytes] | None, event: int, data: object
) -> None:
    if stream is not None:
        os.set_blocking(stream.fileno(), False)
        _widen(stream.fileno())
        selector.register(stream, event, data)


def _widen(descriptor: int) -> None:
    """Let a pipe hold more where the system can (Linux), for fewer turns between ssh and us."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(PermissionError):  # the user's share of pipe memory is used up
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _is_reading(selector: selectors.BaseSelector) -> bool:
    return any(key.events & selectors.EVENT_READ for key in selector.get_map().values())


class _Writer:
    """What is still to be sent."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces: Iterator[bytes] = iter(pieces)
        self.rest = memoryview(b"")

    def fill(self) -> bool:
        """Have something to send; False if there is nothing left."""
        while not self.rest:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self.rest = memoryview(piece)
        return True


def _write(fd: int, writer: _Writer) -> bool:
    """Send what fits; False once there is no more to send, or nobody to send it to."""
    if not writer.fill():
        return False
    try:
        writer.rest = writer.rest[os.write(fd, writer.rest) :]
    except BlockingIOError:
        return True
    except BrokenPipeError:
        return False
    return True


def _read(fd: int, feed: Callable[[bytes], None]) -> bool:
    """Take what is there; False at the end of the stream."""
    try:
        piece = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return True
    if piece:
        feed(piece)
    return bool(piece)


def end_process(process: subprocess.Popen[bytes], *, is_wanted: bool) -> int:
    """Close the pipes and collect the process; its exit status.

    TERM comes before KILL, so that ssh can end the proxy it has started.

    Args:
        process: Child of `pump`.
        is_wanted: Its own exit status is wanted: its streams have ended, so it is about to.
    """
    close_quietly(process.stdin, process.stdout, process.stderr)
    if not is_wanted:
        process.terminate()
    for stop in (process.terminate, process.kill):
        try:
            _await_end(process, _END_S)
            return process.wait(0)
        except subprocess.TimeoutExpired:
            stop()
    return process.wait()


def _await_end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Return as soon as a process has ended; Popen's own wait looks only every few milliseconds.

    Raises:
        subprocess.TimeoutExpired: If it has not ended in time.
    """
    if process.poll() is not None:
        return
    if not hasattr(os, "pidfd_open"):  # Linux only
        process.wait(timeout_s)
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise subprocess.TimeoutExpired(process.args, timeout_s)
    finally:
        os.close(descriptor)


def close_quietly(*streams: IO[bytes] | None) -> None:
    """Close pipes whose other ends may be gone."""
    for stream in streams:
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _OpenEnded:
    """An answer that ends with its streams; it begins when the program is started."""

    has_begun = True
    is_whole = False


def start_child(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A child in a process group of its own, with pipes for all three streams.

    Raises:
        FileNotFoundError, PermissionError: If it cannot be started.
    """
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )


def await_child(
    process: subprocess.Popen[bytes],
    pieces: Iterable[bytes],
    feeds: tuple[Callable[[bytes], None], Callable[[bytes], None]],
    timeout_s: float,
) -> int | None:
    """Feed a child and drain it; its return code, or None if it was late and its group killed.

    Args:
        process: Child of `start_child`.
        pieces: What it is given.
        feeds: Take the pieces of stdout and of stderr; what one raises ends the child as well.
        timeout_s: Deadline of the whole.
    """
    began_s = time.monotonic()
    try:
        if pump(process, pieces, feeds, _OpenEnded(), timeout_s) == "ended":
            code = process.wait(max(0.0, began_s + timeout_s - time.monotonic()))
            close_quietly(process.stdin, process.stdout, process.stderr)
            return code
    except subprocess.TimeoutExpired:  # it closed its streams and continues
        pass
    except BaseException:
        kill_group(process)
        raise
    kill_group(process)
    return None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything in its group, and collect it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    close_quietly(process.stdin, process.stdout, process.stderr)
    with contextlib.suppress(subprocess.TimeoutExpired):  # in D state: the kernel reaps it later
        process.wait(_REAP_S)
