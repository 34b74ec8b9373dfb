"""The transport for a pod that is this machine: child processes and files, same contract as SSH."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError
from nsa_ops.remote.transport import Completed

_SIGNAL_BASE = 128
_REAP_S = 5.0
_PIECE_BYTES = 2**20


class LocalTransport:
    """This machine as the pod; processes get a login's environment, not the caller's."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    @property
    def where(self) -> str:
        """The pod in words."""
        return "this machine"

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run a command in a process group of its own; a missed deadline kills the whole group."""
        process = self._start(argv)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            _kill_group(process)
            message = f"`{_short(argv)}` did not end within {timeout_s:g} s on {self.where}"
            raise DeadlineError(message, hint="Give it longer with `--timeout`") from error
        except BaseException as error:
            _kill_group(process)
            error.add_note(f"`{_short(argv)}` on {self.where} was ended")
            raise
        code = process.returncode
        exit_code = code if code >= 0 else _SIGNAL_BASE - code
        return Completed(tuple(argv), exit_code, stdout, stderr)

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            message = f"`{argv[0]}` does not exist on {self.where}"
            raise NotFoundError(message) from error
        except PermissionError as error:
            message = f"`{argv[0]}` cannot be executed on {self.where}"
            raise StateConflictError(message, hint=f"See `ls -l {argv[0]}`") from error

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:  # noqa: ARG002 (contract; a local copy has no link to lose)
        """Copy a file into place with a rename at the end."""
        _copy_whole(source, Path(target))

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:  # noqa: ARG002 (contract; see put)
        """Copy a file from the pod with a rename at the end."""
        _copy_whole(Path(source), target)

    def stream(
        self,
        path: str,
        offset: int,
        sink: Callable[[bytes], object],
        *,
        max_bytes: int,
        timeout_s: float,  # noqa: ARG002 (contract; see put)
    ) -> None:
        """Bytes of a file from an offset on, piece by piece."""
        if not Path(path).exists():
            message = f"`{path}` does not exist on {self.where}"
            raise NotFoundError(message)
        with Path(path).open("rb") as file:
            file.seek(offset)
            left = max_bytes
            while piece := file.read(min(left, _PIECE_BYTES)):
                left -= len(piece)
                sink(piece)

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        """Bytes of a file from an offset on, together."""
        pieces: list[bytes] = []
        self.stream(path, offset, pieces.append, max_bytes=max_bytes, timeout_s=timeout_s)
        return b"".join(pieces)


def _short(argv: Sequence[str], limit: int = 80) -> str:
    line = " ".join(argv)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything in its group, and collect it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in D state: the kernel reaps it later
        process.wait(_REAP_S)


def _copy_whole(source: Path, target: Path) -> None:
    """Copy beside the target, then rename over it."""
    if not source.is_file():
        message = f"`{source}` does not exist"
        raise NotFoundError(message)
    if not target.parent.is_dir():
        message = f"`{target.parent}` is not a folder"
        raise NotFoundError(message)
    if target.is_dir():
        message = f"`{target}` is a folder, and a file was to be put there"
        raise StateConflictError(message)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    try:
        shutil.copyfile(source, temporary)
        Path(temporary).chmod(source.stat().st_mode & 0o777)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
