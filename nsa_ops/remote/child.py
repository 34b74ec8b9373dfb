"""Run a program of this machine: its output bounded, its whole process group within a deadline."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from nsa_ops.remote.pump import pump

_REAP_S = 5.0


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
            _close_pipes(process)
            return code
    except subprocess.TimeoutExpired:  # it closed its streams and goes on
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
    _close_pipes(process)
    with contextlib.suppress(subprocess.TimeoutExpired):  # in D state: the kernel reaps it later
        process.wait(_REAP_S)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
