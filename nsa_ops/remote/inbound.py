"""Everything that a pod or a backup names, before it becomes a path or a length on this machine."""

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nsa_core.rundir.atomic import is_set_aside
from nsa_core.rundir.names import (
    FileEntry,
    collisions,
    entry_fault,
    folded,
    is_part,
    name_fault,
    path_fault,
    show_name,
)
from nsa_ops.errors import VerificationError

FileT = TypeVar("FileT", bound=FileEntry)
#: Files of one folder that are taken; a run has a few hundred outside its checkpoints.
MAX_FILES = 100_000

_ENTRY = re.compile(
    rb"(?P<size>[0-9]{1,19}) (?P<sha256>[0-9a-f]{64}) (?:\./)?(?P<name>.+)", re.DOTALL
)
#: Begins the entry of a link, pipe, socket or device, which has no size and hash.
ODD = "- - "
#: A file that is being written whole (see nsa_core.rundir.atomic), not yet under its name.
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}")


@dataclass(frozen=True)
class RemoteFile:
    """A file that a pod or a backup names, with its path below the folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Refusal:
    """Something that a pod or a backup names and that is refused; its name is printable."""

    name: str
    reason: str

    @property
    def sentence(self) -> str:
        """The refusal in one line."""
        return f"{self.name} {self.reason}"


@dataclass(frozen=True)
class Listing:
    """Files of a folder on a pod: those that follow the rules, and the others."""

    files: list[RemoteFile]
    refused: list[Refusal]


def parse_listing(content: bytes) -> Listing:
    """Files from `SIZE SHA256 NAME` entries that each end with a NUL; a bad one costs only itself.

    Names of files that are being written (see nsa_core.rundir.atomic) are passed over, and pipes
    and links that a run has set aside (nsa_core.rundir.atomic): they hold nothing to bring.
    """
    found: list[RemoteFile] = []
    refused: list[Refusal] = []
    for entry in filter(None, content.split(b"\0")):
        file = _parse_entry(entry)
        if file is None:
            continue
        if isinstance(file, Refusal):
            refused.append(file)
        elif not is_unfinished(file.name):
            found.append(file)
    files, others = screen(found)
    return Listing(files, [*refused, *others])


def _parse_entry(entry: bytes) -> RemoteFile | Refusal | None:
    if entry.startswith(ODD.encode()):
        name = os.fsdecode(entry.removeprefix(ODD.encode()).removeprefix(b"./"))
        is_old = is_set_aside(name)
        return None if is_old else Refusal(show_name(name), "is a link, or no regular file")
    match = _ENTRY.fullmatch(entry)
    if match is None:
        shown = show_name(os.fsdecode(entry))
        return Refusal(shown, "is no line of a list of files: `SIZE SHA256 NAME`")
    size, sha256 = int(match["size"]), match["sha256"].decode()
    return RemoteFile(os.fsdecode(match["name"]), size, sha256)


def screen(files: Iterable[FileT]) -> tuple[list[FileT], list[Refusal]]:
    """Part the files that may be followed from those that may not, each with its reason."""
    taken: dict[str, FileT] = {}
    refused: list[Refusal] = []
    for file in files:
        fault = entry_fault(file)
        before = taken.get(file.name)
        if fault is None and before is not None:
            is_same = (before.size, before.sha256) == (file.size, file.sha256)
            fault = None if is_same else "is listed twice"
        if fault is None and before is None and len(taken) >= MAX_FILES:
            fault = f"is one more than the limit of {MAX_FILES} files"
        if fault is not None:
            refused.append(Refusal(show_name(file.name), fault))
        else:
            taken.setdefault(file.name, file)
    for name, fault in collisions(list(taken)).items():
        refused.append(Refusal(show_name(name), fault))
        del taken[name]
    return list(taken.values()), refused


def is_unfinished(name: str) -> bool:
    """Whether a name is that of a temporary file which a rename will soon replace."""
    return bool(_UNFINISHED.fullmatch(name.rpartition("/")[2]))


def reserve(files: Sequence[FileT], reserved: Iterable[str]) -> tuple[list[FileT], list[Refusal]]:
    """Part files from those that would stand at a name which belongs to the backup itself.

    Args:
        files: Files that passed `screen`.
        reserved: First components that no file of a run can have; parts of files never can.
    """
    ours = {folded(name) for name in reserved}
    taken: list[FileT] = []
    refused: list[Refusal] = []
    for file in files:
        parts = file.name.split("/")
        if folded(parts[0]) in ours or any(is_part(part) for part in parts):
            refused.append(Refusal(show_name(file.name), "is a name that the backup itself uses"))
        else:
            taken.append(file)
    return taken, refused


def summarize(refused: Sequence[Refusal], limit: int = 3) -> str:
    """The first refusals in one line, and how many more there are."""
    first = "; ".join(one.sentence for one in refused[:limit])
    more = len(refused) - limit
    return f"{first}; and {more} more" if more > 0 else first


def check_path(root: Path, name: str) -> None:
    """Raise VerificationError unless it is a regular file below a folder, behind no link."""
    fault = path_fault(root, name)
    if fault is not None:
        message = f"The file {show_name(name)} in `{root}` is {fault}"
        raise VerificationError(message, hint="Nothing outside the folder is read")


def check_folder(root: Path, name: str) -> None:
    """Raise VerificationError unless it is a folder below another one, behind no link."""
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink() or not path.is_dir():
            message = f"`{path}` is a link or no folder"
            raise VerificationError(message, hint="Nothing outside the folder is read")


def make_parents(root: Path, name: str) -> Path:
    """The path of a file below a folder; its parent folders are made, and no link is followed.

    Raises:
        VerificationError: If the name is refused, or a link or file is in the way.
    """
    fault = name_fault(name)
    if fault is not None:
        message = f"The file {show_name(name)} {fault}"
        raise VerificationError(message, hint="Nothing was written for it")
    target = root / name
    folder = root
    for part in name.split("/")[:-1]:
        folder = folder / part
        folder.mkdir(exist_ok=True) if not _is_there(folder) else _check_folder(folder)
    if _is_there(target) and not stat.S_ISREG(target.lstat().st_mode):
        message = f"`{target}` is no regular file, but a file must be written there"
        raise VerificationError(message, hint="Move it away, then repeat it")
    return target


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _check_folder(folder: Path) -> None:
    if not stat.S_ISDIR(folder.lstat().st_mode):
        message = f"`{folder}` is no folder, but a file must be written into it"
        raise VerificationError(message, hint="Move it away, then repeat it")
