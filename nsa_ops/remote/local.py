"""The transport for a pod that is this machine: child processes and files, same contract as SSH."""

import math
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsa_core.rundir.names import beside
from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError
from nsa_ops.remote.pump import await_child, start_child
from nsa_ops.remote.transport import (
    MAX_OUTPUT_BYTES,
    Ceiling,
    Completed,
    Transport,
    shorten,
)

_SIGNAL_BASE = 128
_PIECE_BYTES = 2**20


class LocalTransport(Transport):
    """This machine as the pod; processes get a login's environment, not the caller's."""

    def __init__(self, environment: Mapping[str, str], *, longest_s: float = math.inf) -> None:
        self._environment = dict(environment)
        self.longest_s = longest_s

    @property
    def where(self) -> str:
        """The pod in words."""
        return "this machine"

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
        timeout_s = min(timeout_s, self.longest_s)
        errors = bytearray()
        what = f"`{shorten(argv)}` on {self.where}"
        feeds = (Ceiling(sink, max_bytes, what), Ceiling(errors.extend, MAX_OUTPUT_BYTES, what))
        try:
            code = await_child(self._start(argv), [stdin] if stdin else [], feeds, timeout_s)
        except KeyboardInterrupt as stop:
            stop.add_note(f"{what} was ended")
            raise
        if code is None:
            message = f"`{shorten(argv)}` did not end within {timeout_s:g} s on {self.where}"
            raise DeadlineError(message, hint="Give it longer with `--timeout`")
        exit_code = code if code >= 0 else _SIGNAL_BASE - code
        return Completed(tuple(argv), exit_code, b"", bytes(errors))

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return start_child(argv, self._environment)
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
        if not Path(path).is_file():
            message = f"`{path}` on {self.where} is no regular file"
            raise StateConflictError(message)
        with Path(path).open("rb") as file:
            file.seek(offset)
            left = max_bytes
            while piece := file.read(min(left, _PIECE_BYTES)):
                left -= len(piece)
                sink(piece)


def _copy_whole(source: Path, target: Path) -> None:
    """Copy beside the target, then rename over it."""
    if not source.is_file():
        message = f"`{source}` does not exist"
        raise NotFoundError(message)
    if not target.parent.is_dir():
        message = f"`{target.parent}` is not a folder"
        raise NotFoundError(message)
    if target.is_dir():
        message = f"`{target}` is a folder, but a file must be written there"
        raise StateConflictError(message)
    temporary = target.with_name(beside(target.name, f".{secrets.token_hex(4)}"))
    try:
        shutil.copyfile(source, temporary)
        temporary.chmod(source.stat().st_mode & 0o777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
