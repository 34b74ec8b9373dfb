"""Send a folder of a backup to a pod: by rsync over the shared link where there is one."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from nsa_ops.context import Tell
from nsa_ops.errors import LocalResourceError, NotFoundError, PartialError
from nsa_ops.remote.audit import AuditedTransport
from nsa_ops.remote.inbound import check_path
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import MAX_ANSWER_BYTES, QUICK_S, Transport
from nsa_ops.remote.trees import put_tree

SEND_TIMEOUT_S = 3600.0


def send_folder(
    transport: Transport,
    source: Path,
    target: PurePosixPath,
    names: Sequence[str],
    tell: Tell,
) -> None:
    """Make a folder on a pod hold these files of a folder here; a cut copy goes on later.

    Without rsync on both sides, each file is sent whole, and that is told.

    Args:
        transport: Door to the pod.
        source: Folder here.
        target: Folder there; made if need be.
        names: Plain names of files that were verified; nothing else in the folder is sent.
        tell: Takes the line that says why rsync is not used.

    Raises:
        VerificationError: If the contents differ afterwards.
        PodUnreachableError, DeadlineError: What was sent is used the next time.
    """
    ask(transport, "mkdir", "-p", "--", str(target))
    door = transport.inner if isinstance(transport, AuditedTransport) else transport
    if isinstance(door, OpenSSHTransport):
        try:
            _sync(transport, door, source, target, names)
        except (NotFoundError, LocalResourceError) as error:
            tell(f"{error.message}: each file is sent whole, and a cut one again")
        else:
            return
    for name in names:
        send_file(transport, source, name, target)


def send_file(transport: Transport, source: Path, name: str, target: PurePosixPath) -> None:
    """Send one file of a folder here, whole; a link is never followed.

    Raises:
        VerificationError: If it is no regular file, or a link leads to it.
    """
    check_path(source, name)
    transport.put(source / name, str(target / name), timeout_s=SEND_TIMEOUT_S)


def _sync(
    transport: Transport,
    door: OpenSSHTransport,
    source: Path,
    target: PurePosixPath,
    names: Sequence[str],
) -> None:
    if not isinstance(transport, AuditedTransport):
        put_tree(door, source, str(target), names, timeout_s=SEND_TIMEOUT_S)
        return
    with transport.recorded("rsync", {"target": str(target)}) as end:
        put_tree(door, source, str(target), names, timeout_s=SEND_TIMEOUT_S)
        end["bytes"] = sum((source / name).lstat().st_size for name in names)


def ask(transport: Transport, *argv: str, timeout_s: float = QUICK_S) -> None:
    """Run a command that has to end well.

    Raises:
        PartialError: If it does not; with its own last words.
    """
    done = transport.run(argv, timeout_s=timeout_s, max_bytes=MAX_ANSWER_BYTES)
    if done.exit_code:
        message = f"`{argv[0]}` ended with code {done.exit_code} on {transport.where}"
        words = f": {done.last_error_line}" if done.last_error_line else ""
        raise PartialError(message + words, hint="See the rights and the space there")
