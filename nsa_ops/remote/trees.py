"""Folders to a pod by rsync over the shared link: resumable, then compared by content."""

import shlex
import subprocess
from pathlib import Path

from nsa_ops.errors import (
    DeadlineError,
    LocalResourceError,
    NotFoundError,
    OpsError,
    PartialError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.remote.framed import last_line
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import QUICK_S

#: What came before a cut waits here; a good file stays in its place until the new one is whole.
PARTIAL_DIR = ".nsa-partial"

_NO_SOURCE, _PARTIAL, _VANISHED, _NOT_FOUND = 3, 23, 24, 127
#: Stands for the pod; the shared link knows where it is.
_HOST = "pod"


def put_tree(transport: OpenSSHTransport, source: Path, target: str, *, timeout_s: float) -> None:
    """Make a folder on the pod hold what a folder here holds; nothing there is deleted.

    Raises:
        NotFoundError: If the source is no folder, or rsync is missing on the pod.
        VerificationError: If the contents differ afterwards.
        PartialError, PodUnreachableError, DeadlineError: What was sent is used the next time.
    """
    if not source.is_dir():
        message = f"`{source}` is not a folder"
        raise NotFoundError(message)
    _sync(transport, f"{source.absolute()}/", f"{_HOST}:{target}/", timeout_s)


def _sync(transport: OpenSSHTransport, source: str, target: str, timeout_s: float) -> None:
    transport.run(("true",), timeout_s=QUICK_S)  # opens the shared link, or says why it cannot
    words = ["rsync", "-a", "-s", f"--partial-dir={PARTIAL_DIR}", "-e", _remote_shell(transport)]
    ends = ["--", source, target]
    _rsync(transport, [*words, *ends], timeout_s)
    differing = _rsync(transport, [*words, "-n", "-c", "--out-format=%n", *ends], timeout_s)
    names = [name for name in differing.splitlines() if not name.endswith("/")]
    if names:
        message = f"{len(names)} files differ after the copy, such as `{names[0]}`"
        raise VerificationError(
            message, hint="They change meanwhile: repeat it when nothing writes"
        )


def _remote_shell(transport: OpenSSHTransport) -> str:
    """The shared link and no other: without it the connection fails at once."""
    only = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes"]
    return shlex.join(["ssh", "-F", "/dev/null", *only, "-S", str(transport.control_path)])


def _rsync(transport: OpenSSHTransport, argv: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=transport.environment,
            timeout=timeout_s, start_new_session=True, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        message = "`rsync` is not installed on this machine"
        raise LocalResourceError(message, hint="Install rsync") from error
    except subprocess.TimeoutExpired as error:
        message = f"The copy did not end within {timeout_s:g} s on {transport.where}"
        raise DeadlineError(message, hint="Repeat it: it goes on where it stopped") from error
    if done.returncode:
        raise explain_rsync(done.returncode, done.stderr.decode(errors="replace"), transport.where)
    return done.stdout.decode(errors="replace")


def explain_rsync(status: int, said: str, where: str) -> OpsError:
    """What went wrong, from rsync's exit code and its own words."""
    words = f": {last_line(said)}" if said.strip() else ""
    if "is your shell clean" in said or "protocol version mismatch" in said:
        message = f"The login's start-up file on {where} prints output, which breaks rsync{words}"
        hint = "Let ~/.bashrc (or ~/.zshenv) print only in interactive shells"
        return StateConflictError(message, hint=hint)
    if status == _NOT_FOUND:
        return NotFoundError(f"`rsync` does not exist on {where}", hint="Install rsync there")
    if status == _NO_SOURCE or "No such file or directory" in said:
        return NotFoundError(f"A folder to copy does not exist{words}")
    if status in {_PARTIAL, _VANISHED}:
        return PartialError(f"Not everything was copied to or from {where}{words}")
    message = f"The copy to or from {where} ended with code {status}{words}"
    return PodUnreachableError(message, hint="Repeat it: it goes on where it stopped")
