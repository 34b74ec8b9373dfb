"""Folders to a pod by rsync over the shared link: resumable, then compared by content."""

import os
import shlex
from collections.abc import Sequence
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
from nsa_ops.quantities import count_of
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.pump import await_child, start_child
from nsa_ops.remote.transport import (
    MAX_LISTING_BYTES,
    MAX_OUTPUT_BYTES,
    QUICK_S,
    Ceiling,
    last_line,
)

#: What came before a cut waits here; a good file stays in its place until the new one is whole.
PARTIAL_DIR = ".nsa-partial"

#: Seconds without a byte after which rsync gives up; hashing a checkpoint takes minutes.
_SILENT_S = 900
_NO_SOURCE, _PARTIAL, _VANISHED, _NOT_FOUND = 3, 23, 24, 127
#: Stands for the pod; the shared link knows where it is.
_HOST = "pod"


def put_tree(
    transport: OpenSSHTransport,
    source: Path,
    target: str,
    names: Sequence[str],
    *,
    timeout_s: float,
) -> None:
    """Make a folder on the pod hold these files of a folder here; nothing there is deleted.

    Args:
        transport: Link to the pod.
        source: Folder here.
        target: Folder there.
        names: Paths relative to both. Links, devices and anything else in the source stay here.
        timeout_s: Deadline of each of the two passes; the link's own, if that is shorter.

    Raises:
        NotFoundError: If the source is no folder, or rsync is missing on the pod.
        VerificationError: If the contents differ afterwards.
        PartialError, PodUnreachableError, DeadlineError: What was sent is used the next time.
    """
    if not source.is_dir():
        message = f"`{source}` is not a folder"
        raise NotFoundError(message)
    listed = b"".join(os.fsencode(name) + b"\0" for name in names)
    transport.run(("true",), timeout_s=QUICK_S)  # opens the shared link, or says why it cannot
    words = ["rsync", "-a", "--no-links", "--no-devices", "--no-specials", "-s"]
    words += ["--files-from=-", "--from0", f"--partial-dir={PARTIAL_DIR}"]
    timeout_s = min(timeout_s, transport.longest_s)
    words += [f"--timeout={_SILENT_S}", "-e", shlex.join(transport.shared_argv)]
    ends = ["--", f"{source.absolute()}/", f"{_HOST}:{target}/"]
    _rsync(transport, [*words, *ends], listed, timeout_s)
    compare = [*words, "-n", "-c", "--out-format=%n", *ends]
    differing = _rsync(transport, compare, listed, timeout_s)
    found = [name for name in differing.splitlines() if not name.endswith("/")]
    if found:
        files = count_of(len(found), "file")
        message = f"{files} differ after the copy, such as `{found[0]}`"
        raise VerificationError(
            message, hint="They changed meanwhile: repeat it when nothing writes to them"
        )


def _rsync(transport: OpenSSHTransport, argv: list[str], names: bytes, timeout_s: float) -> str:
    output, errors = bytearray(), bytearray()
    what = f"`rsync` to {transport.where}"
    feeds = (
        Ceiling(output.extend, MAX_LISTING_BYTES, what),
        Ceiling(errors.extend, MAX_OUTPUT_BYTES, what),
    )
    try:
        process = start_child(argv, transport.environment)
    except FileNotFoundError as error:
        message = "`rsync` is not installed on this machine"
        raise LocalResourceError(message, hint="Install rsync") from error
    code = await_child(process, [names], feeds, timeout_s)
    if code is None:
        message = f"The copy did not end within {timeout_s:g} s on {transport.where}"
        raise DeadlineError(message, hint="Repeat it to continue where it stopped")
    if code:
        raise explain_rsync(code, errors.decode(errors="replace"), transport.where)
    return output.decode(errors="replace")


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
    return PodUnreachableError(message, hint="Repeat it to continue where it stopped")
