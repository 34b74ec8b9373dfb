"""Room on a disk, here or on a pod, before anything is written to it."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TypeVar

from nsa_ops.errors import LocalResourceError, VerificationError
from nsa_ops.quantities import format_bytes
from nsa_ops.remote.transport import MAX_ANSWER_BYTES, QUICK_S, Transport

KeyT = TypeVar("KeyT")
#: Left free on a disk beyond what is written, so that a log line or a registry still fits.
RESERVE_BYTES = 64 * 2**20

# The file system that holds a path, or would hold it.
_FREE = """
p=$1
while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done
df -Pk -- "$p"
"""
#: Blocks of 1024 bytes: all, used, available, and the share in use.
_DF_LINE = re.compile(r"\s\d+\s+\d+\s+(?P<free>-?\d{1,18})\s+(?:\d+%|-)\s")


def read_free_bytes(path: Path) -> int:
    """Bytes free for us on this machine's disk that holds a path, or would hold it."""
    existing = next(one for one in (path, *path.parents) if one.exists())
    return shutil.disk_usage(existing).free


def read_free_bytes_there(transport: Transport, path: PurePosixPath) -> int | None:
    """The same on a pod; None where its `df` says nothing that can be understood."""
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
    """What to leave, the largest first, so that the rest fits on a disk; pure.

    Nothing is left out where it would not help: then the disk has no room for the smallest either.
    """
    total = sum(sizes.values())
    left: list[KeyT] = []
    for key in sorted(sizes, key=lambda one: sizes[one], reverse=True):
        if total + RESERVE_BYTES <= free_bytes:
            return left
        left.append(key)
        total -= sizes[key]
    return []


def no_room(root: Path, name: str, size: int, free_bytes: int) -> str:
    """The sentence for one thing that is too large for what is free."""
    return (
        f"The disk of `{root}` has {format_bytes(free_bytes)} free, and {name} needs "
        f"{format_bytes(size)} and {format_bytes(RESERVE_BYTES)} to spare"
    )


def check_space(root: Path, pending_bytes: int, free_bytes: int) -> None:
    """Raise LocalResourceError unless this machine's disk has room for the bytes and a reserve."""
    if free_bytes < pending_bytes + RESERVE_BYTES:
        message = f"The disk of `{root}` has {_need(pending_bytes, free_bytes)}"
        raise LocalResourceError(message, hint="Free space, or name a folder on another disk")


def check_space_there(transport: Transport, path: PurePosixPath, pending_bytes: int) -> None:
    """Raise LocalResourceError if a pod's disk is known to have no room for the bytes."""
    free_bytes = read_free_bytes_there(transport, path)
    if free_bytes is not None and free_bytes < pending_bytes + RESERVE_BYTES:
        need = _need(pending_bytes, free_bytes)
        message = f"The disk of `{path}` on {transport.where} has {need}"
        raise LocalResourceError(message, hint="Free space there, or name another place")


def _need(pending_bytes: int, free_bytes: int) -> str:
    return (
        f"{format_bytes(free_bytes)} free, and the backup needs {format_bytes(pending_bytes)} "
        f"and {format_bytes(RESERVE_BYTES)} to spare"
    )
