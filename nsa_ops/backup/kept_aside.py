"""Checkpoints that pulls have kept aside in a backup: evidence, removed only on demand."""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.layout import CHECKPOINT_NAME
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.quantities import format_bytes

#: The names that `BackupFolder.aside`, `BackupFolder.conflicting` and a pull give them.
_NAME = re.compile(
    rf"(?:damaged_|abandoned_){CHECKPOINT_NAME.pattern}(?:_[0-9]{{1,6}})?|"
    rf"(?:damaged_)?conflict_{CHECKPOINT_NAME.pattern}_[0-9a-f]{{12}}(?:_[0-9]{{1,6}})?"
)
_REMOVING = ".removing_"


@dataclass(frozen=True)
class KeptAside:
    """A checkpoint that another one of its step has replaced, or contradicts."""

    name: str
    size_bytes: int

    @property
    def words(self) -> str:
        """Its name and size."""
        return f"{self.name} ({format_bytes(self.size_bytes)})"


def list_kept_aside(folder: BackupFolder) -> list[KeptAside]:
    """What is kept aside, by name; nothing where the folder of checkpoints is a link."""
    checkpoints = folder.run.checkpoints
    if checkpoints.is_symlink() or not checkpoints.is_dir():
        return []
    found = sorted(path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name))
    return [KeptAside(path.name, _size_of(path)) for path in found]


def _size_of(path: Path) -> int:
    """Bytes of a folder and all below it; a link is not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(
        Path(parent, name).lstat().st_size for parent, _, names in os.walk(path) for name in names
    )


def bytes_of(kept: Sequence[KeptAside]) -> int:
    """Size of all of them."""
    return sum(one.size_bytes for one in kept)


def remove_from(folder: BackupFolder, name: str) -> None:
    """Remove a checkpoint under whatever name; renamed first, so that none is ever half there."""
    path = folder.run.checkpoints / name
    doomed = path.with_name(f"{_REMOVING}{name}")
    _delete(doomed)  # of a prune that was cut
    path.rename(doomed)
    _delete(doomed)


def clear_removed(folder: BackupFolder) -> None:
    """Delete what a prune that was cut has renamed."""
    checkpoints = folder.run.checkpoints
    for path in [] if checkpoints.is_symlink() else checkpoints.glob(f"{_REMOVING}*"):
        name = path.name.removeprefix(_REMOVING)
        if CHECKPOINT_NAME.fullmatch(name) or _NAME.fullmatch(name):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a folder, or a link or file that has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
