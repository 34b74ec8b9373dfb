"""Send a folder of a backup to a pod: by rsync over the shared link where there is one."""

from pathlib import Path, PurePosixPath

from nsa_ops.errors import LocalResourceError, NotFoundError, PartialError
from nsa_ops.remote.audit import AuditedTransport
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import QUICK_S, Transport
from nsa_ops.remote.trees import put_tree
from nsa_ops.runs.context import Tell

SEND_TIMEOUT_S = 3600.0


def send_folder(transport: Transport, source: Path, target: PurePosixPath, tell: Tell) -> None:
    """Make a folder on a pod hold the files of a flat folder here; a cut copy goes on later.

    Without rsync on both sides, each file is sent whole, and that is told.

    Args:
        transport: Door to the pod.
        source: Folder here, without subfolders.
        target: Folder there; made if need be.
        tell: Takes the line that says why rsync is not used.

    Raises:
        VerificationError: If the contents differ afterwards.
        PodUnreachableError, DeadlineError: What was sent is used the next time.
    """
    ask(transport, "mkdir", "-p", "--", str(target))
    door = transport.inner if isinstance(transport, AuditedTransport) else transport
    if isinstance(door, OpenSSHTransport):
        try:
            _sync(transport, door, source, target)
        except (NotFoundError, LocalResourceError) as error:
            tell(f"{error.message}: each file is sent whole, and a cut one again")
        else:
            return
    for file in sorted(source.iterdir()):
        transport.put(file, str(target / file.name), timeout_s=SEND_TIMEOUT_S)


def _sync(
    transport: Transport, door: OpenSSHTransport, source: Path, target: PurePosixPath
) -> None:
    if not isinstance(transport, AuditedTransport):
        put_tree(door, source, str(target), timeout_s=SEND_TIMEOUT_S)
        return
    with transport.recorded("rsync", {"target": str(target)}) as end:
        put_tree(door, source, str(target), timeout_s=SEND_TIMEOUT_S)
        end["bytes"] = sum(file.stat().st_size for file in source.iterdir())


def ask(transport: Transport, *argv: str, timeout_s: float = QUICK_S) -> None:
    """Run a command that has to end well.

    Raises:
        PartialError: If it does not; with its own last words.
    """
    done = transport.run(argv, timeout_s=timeout_s)
    if done.exit_code:
        message = f"`{argv[0]}` ended with code {done.exit_code} on {transport.where}"
        words = f": {done.last_error_line}" if done.last_error_line else ""
        raise PartialError(message + words, hint="See the rights and the space there")
