"""A disk here or on a pod: is there room for what is to be written, and sending files to it."""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from nsa_core.rundir.checkpoint import hash_file
from nsa_ops.context import Tell
from nsa_ops.errors import LocalResourceError, NotFoundError, PartialError, VerificationError
from nsa_ops.quantities import format_bytes
from nsa_ops.remote.audit import AuditedTransport
from nsa_ops.remote.inbound import check_path
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import MAX_ANSWER_BYTES, QUICK_S, Transport
from nsa_ops.remote.trees import put_tree

KeyT = TypeVar("KeyT")
#: Left free on a disk beyond what is written, so that a log line or a registry still fits.
RESERVE_BYTES = 64 * 2**20
SEND_TIMEOUT_S = 3600.0

# The file system that holds a path, or would hold it.
_FREE = """
p=$1
while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done
df -Pk -- "$p"
"""
#: Blocks of 1024 bytes: all, used, available, and the share in use.
_DF_LINE = re.compile(r"\s\d+\s+\d+\s+(?P<free>-?\d{1,18})\s+(?:\d+%|-)\s")


def read_free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds a path, or would hold it."""
    existing = next(one for one in (path, *path.parents) if one.exists())
    return shutil.disk_usage(existing).free


def read_free_bytes_there(transport: Transport, path: PurePosixPath) -> int | None:
    """The same on a pod; None if the output of its `df` cannot be read."""
    argv = ("sh", "-c", _FREE, "sh", str(path))
    try:
        done = transport.run(argv, timeout_s=QUICK_S, max_bytes=MAX_ANSWER_BYTES)
    except VerificationError:
        return None
    return parse_free_bytes(done.text)


def parse_free_bytes(df: str) -> int | None:
    """Available bytes from what `df -Pk` printed about one file system; pure."""
    lines = df.strip().splitlines()
    found = _DF_LINE.search(lines[-1]) if len(lines) > 1 else None
    return max(0, int(found["free"])) * 1024 if found else None


def choose_too_large(sizes: Mapping[KeyT, int], free_bytes: int) -> list[KeyT]:
    """What to leave out, the largest first, so that the rest fits on a disk; pure.

    Nothing is left out if the disk has no room even for the smallest.
    """
    total = sum(sizes.values())
    left: list[KeyT] = []
    for key in sorted(sizes, key=lambda one: sizes[one], reverse=True):
        if total + RESERVE_BYTES <= free_bytes:
            return left
        left.append(key)
        total -= sizes[key]
    return []


def describe_need(place: str, what: str, size: int, free_bytes: int) -> str:
    """The message about something that needs more than the free space of a disk."""
    return (
        f"The disk of {place} has {format_bytes(free_bytes)} free, and {what} needs "
        f"{format_bytes(size)} and {format_bytes(RESERVE_BYTES)} to spare"
    )


def _require_room(
    place: str, pending_bytes: int, free_bytes: int | None, what: str, hint: str
) -> None:
    if free_bytes is not None and free_bytes < pending_bytes + RESERVE_BYTES:
        message = describe_need(place, what, pending_bytes, free_bytes)
        raise LocalResourceError(message, hint=hint)


def check_space(
    root: Path,
    pending_bytes: int,
    free_bytes: int,
    what: str = "the backup",
    hint: str = "Free space, or name a folder on another disk",
) -> None:
    """Raise LocalResourceError unless this machine's disk has room for the bytes and a reserve."""
    _require_room(f"`{root}`", pending_bytes, free_bytes, what, hint)


def check_space_there(
    transport: Transport,
    path: PurePosixPath,
    pending_bytes: int,
    what: str = "the backup",
    hint: str = "Free space there, or name another place",
) -> None:
    """Raise LocalResourceError if a pod's disk is known to have no room for the bytes."""
    free_bytes = read_free_bytes_there(transport, path)
    _require_room(f"`{path}` on {transport.where}", pending_bytes, free_bytes, what, hint)


def send_folder(
    transport: Transport,
    source: Path,
    target: PurePosixPath,
    names: Sequence[str],
    tell: Tell,
) -> None:
    """Copy verified files of a folder here into a folder on a pod; a cut copy continues later.

    Without rsync on both sides, each file is sent whole, and `tell` gets a line about that.

    Raises:
        VerificationError: If the contents differ afterwards.
        PodUnreachableError, DeadlineError: What was sent is used the next time.
    """
    ask(transport, "mkdir", "-p", "--", str(target))
    link = transport.inner if isinstance(transport, AuditedTransport) else transport
    if isinstance(link, OpenSSHTransport):
        try:
            _sync(transport, link, source, target, names)
        except (NotFoundError, LocalResourceError) as error:
            tell(f"{error.message}: each file is sent whole, and a cut one from its beginning")
        else:
            return
    for name in names:
        send_file(transport, source, name, target)


def send_file(transport: Transport, source: Path, name: str, target: PurePosixPath) -> None:
    """Send one file of a folder here; raise VerificationError if it is a link or behind one."""
    check_path(source, name)
    transport.put(source / name, str(target / name), timeout_s=SEND_TIMEOUT_S)


def _sync(
    transport: Transport,
    link: OpenSSHTransport,
    source: Path,
    target: PurePosixPath,
    names: Sequence[str],
) -> None:
    if not isinstance(transport, AuditedTransport):
        put_tree(link, source, str(target), names, timeout_s=SEND_TIMEOUT_S)
        return
    with transport.recorded("rsync", {"target": str(target)}) as end:
        put_tree(link, source, str(target), names, timeout_s=SEND_TIMEOUT_S)
        end["bytes"] = sum((source / name).lstat().st_size for name in names)


def check_copies(
    transport: Transport, there: Mapping[str, str], source: Path, target: PurePosixPath,
    names: Iterable[str],
) -> None:  # fmt: skip
    """Compare the hash of each file of a folder here with that of its copy on a pod.

    Args:
        transport: The pod.
        there: Hashes of the copies by name.
        source: Folder here.
        target: Folder of the copies.
        names: Files to compare.

    Raises:
        VerificationError: If a copy is missing or different; names both hashes.
    """
    for name in names:
        expected, found = hash_file(source / name), there.get(name, "nothing")
        if expected != found:
            place = f"`{target / name}` on {transport.where}"
            message = f"{place} has sha256 {found}, and {expected} was expected"
            raise VerificationError(message, hint="Try again; that disk may be failing")


def ask(transport: Transport, *argv: str, timeout_s: float = QUICK_S) -> str:
    """What a command on a pod prints; PartialError with its last line if it fails."""
    done = transport.run(argv, timeout_s=timeout_s, max_bytes=MAX_ANSWER_BYTES)
    if done.exit_code:
        message = f"`{argv[0]}` ended with code {done.exit_code} on {transport.where}"
        last = f": {done.last_error_line}" if done.last_error_line else ""
        raise PartialError(message + last, hint="Check the permissions and the free space there")
    return done.text
