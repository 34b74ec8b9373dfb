"""Which checkpoints of a backup are whole, and whether they have been touched since."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.checkpoint import MANIFEST_NAME, Checkpoint, hash_file, read_checkpoint
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.survey import RemoteCheckpoint
from nsa_ops.backup.verify import checkpoint_damage
from nsa_ops.remote.inbound import path_fault
from nsa_ops.store import Receipt

#: Inode, size, and times of content and of status of each file: no writer can set the last one.
Mark = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Held:
    """A checkpoint of a pod that is here, whole when it was hashed.

    Attributes:
        remote: As the pod's manifest describes it.
        mark: What its files were before they were hashed.
    """

    remote: RemoteCheckpoint
    mark: Mark


def find_held(folder: BackupFolder, remote: RemoteCheckpoint) -> Held | None:
    """This very checkpoint if it is in the backup and all its hashes agree now."""
    mark = mark_of(folder.run.checkpoint(remote.step), remote)
    return Held(remote, mark) if mark and is_whole_here(folder, remote) else None


def mark_of(path: Path, remote: RemoteCheckpoint) -> Mark:
    """What the files of a checkpoint are now; empty if one is missing."""
    names = [MANIFEST_NAME, *(file.name for file in remote.manifest.files)]
    try:
        facts = [os.lstat(path / name) for name in names]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in facts)


def is_whole_here(folder: BackupFolder, remote: RemoteCheckpoint) -> bool:
    """Whether this very checkpoint is in the backup and all its hashes agree now."""
    return is_whole_at(folder.run.checkpoint(remote.step), remote)


def is_whole_at(path: Path, remote: RemoteCheckpoint) -> bool:
    """Whether this very checkpoint stands in a folder and all its hashes agree now."""
    if path.is_symlink() or path_fault(path, MANIFEST_NAME) is not None:
        return False
    if (path / MANIFEST_NAME).read_bytes() != remote.content:
        return False
    return not checkpoint_damage(Checkpoint(path, remote.manifest), is_named=False)


def is_held_good(path: Path, run_id: str, receipts: Iterable[Receipt]) -> bool:
    """Whether a whole checkpoint of a run stands in a folder: the one of its receipt, if any."""
    if path.is_symlink() or path_fault(path, MANIFEST_NAME) is not None:
        return False
    receipt = next((one for one in receipts if one.path == str(path)), None)
    if receipt is not None and receipt.manifest_sha256 != hash_file(path / MANIFEST_NAME):
        return False
    local = read_checkpoint(path)
    if local is None or local.manifest.run_id != run_id:
        return False
    return not checkpoint_damage(local)
