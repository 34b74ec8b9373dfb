"""Record what a block of code makes durable and renames, in the order the kernel is asked."""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Sync:
    """One fsync: of a folder, or of a file with the content it had at that moment."""

    path: Path
    content: str


@dataclass(frozen=True)
class Rename:
    """One rename, and the content that it put under the new name: by file for a folder."""

    source: Path
    target: Path
    content: dict[str, str]


class DiskTrace:
    """fsync and rename of this process while it is watched; both still happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Sync | Rename] = []
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._watch_rename(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._watch_sync(os.fsync))

    def syncs_of(self, path: Path) -> list[int]:
        """Places in `calls` of the fsyncs of a path."""
        return [
            place
            for place, call in enumerate(self.calls)
            if isinstance(call, Sync) and call.path == path
        ]

    def rename_to(self, path: Path) -> tuple[int, Rename]:
        """The only rename to a path, and its place in `calls`."""
        found = [
            (place, call)
            for place, call in enumerate(self.calls)
            if isinstance(call, Rename) and call.target == path
        ]
        assert len(found) == 1, f"{len(found)} renames to {path}"
        return found[0]

    def synced_before(self, place: int) -> set[str]:
        """Content of every file that was durable at a place in `calls`."""
        return {call.content for call in self.calls[:place] if isinstance(call, Sync)}

    def _watch_sync(self, original):
        def fsync(descriptor):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            self.calls.append(Sync(path, "" if is_folder else digest(path)))
            original(descriptor)

        return fsync

    def _watch_rename(self, original):
        def rename(source, target, **options):
            source, target = Path(source), Path(target)
            files = sorted(source.iterdir()) if source.is_dir() else [source]
            self.calls.append(Rename(source, target, {path.name: digest(path) for path in files}))
            original(source, target, **options)

        return rename


def digest(path: Path) -> str:
    """Hash of the content of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
