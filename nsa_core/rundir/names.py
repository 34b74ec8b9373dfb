"""Rules for the names, sizes and hashes of files that another machine announces.

A name, a size or a hash from a pod or a backup is only text. Nothing uses it as a path, a length
or a receipt before it has passed these rules.
"""

import hashlib
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

#: What Linux file systems take for one component, in bytes.
MAX_COMPONENT_BYTES = 255
#: Below the 4096 of PATH_MAX, so that a backup's own folder fits in front of it.
MAX_PATH_BYTES = 1024
MAX_DEPTH = 16
#: 16 TiB, the largest file of ext4; also the largest checkpoint.
MAX_SIZE = 2**44
#: Files of one checkpoint; a sharded one has a few hundred.
MAX_CHECKPOINT_FILES = 10_000

#: What makes a folder a repository, bare or not: git in it runs what its `config` names. `git~1` is
#: how some file systems spell `.git`. No run has a file of these names.
_REPOSITORY_NAMES = frozenset({".git", "git~1", "head"})
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN = 120
#: Control, format (which reorder or hide text) and surrogate characters, line and paragraph ends.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class FileEntry(Protocol):
    """A file as a listing or a manifest names it."""

    @property
    def name(self) -> str:
        """Relative path, or a plain name in a checkpoint."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def sha256(self) -> str:
        """Hash in hex."""
        ...


def name_fault(name: str) -> str | None:
    """Why a text cannot be the path of a file below a folder; None if it can."""
    text_fault = _text_fault(name)
    if text_fault is not None:
        return text_fault
    if name.startswith("/"):
        return "is absolute"
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        return "is not normalised: it has an empty, `.` or `..` component"
    if any(folded(part).rstrip(". ") in _REPOSITORY_NAMES for part in parts):
        return "would make a git repository of its folder, and git runs what one configures"
    if len(parts) > MAX_DEPTH:
        return f"has {len(parts)} components, and the limit is {MAX_DEPTH}"
    longest = max(len(part.encode()) for part in parts)
    if longest > MAX_COMPONENT_BYTES:
        return f"has a component of {longest} bytes, and the limit is {MAX_COMPONENT_BYTES}"
    if len(name.encode()) > MAX_PATH_BYTES:
        return f"has {len(name.encode())} bytes, and the limit is {MAX_PATH_BYTES}"
    return None


def _text_fault(name: str) -> str | None:
    if not name:
        return "is empty"
    if "\\" in name:
        return "has a backslash"
    if name.isascii() and name.isprintable():
        return None
    if any("\ud800" <= character <= "\udfff" for character in name):
        return "is not UTF-8"
    if any(unicodedata.category(character) in _REFUSED_CATEGORIES for character in name):
        return "has a control character"
    return None


def path_fault(root: Path, name: str) -> str | None:
    """Why a file below a folder of this machine must not be read; None if it may be.

    No component below the folder may be a link.
    """
    fault = name_fault(name)
    if fault is not None:
        return fault
    path = root
    parts = name.split("/")
    for number, part in enumerate(parts, 1):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        if stat.S_ISLNK(mode):
            return "a link" if number == len(parts) else f"behind the link `{path}`"
        if number == len(parts) and not stat.S_ISREG(mode):
            return "no regular file"
    return None


def entry_fault(entry: FileEntry) -> str | None:
    """Why a named file with its size and hash is refused; None if it is not."""
    fault = name_fault(entry.name)
    if fault is not None:
        return fault
    if not 0 <= entry.size <= MAX_SIZE:
        return f"has the size {show_number(entry.size)}"
    if not _SHA256.fullmatch(entry.sha256):
        return f"has the hash {show_name(entry.sha256)}, and that is no sha256"
    return None


def folded(name: str) -> str:
    """The name as a file system sees it that ignores case or normalises Unicode."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", name).casefold())


def collisions(names: Sequence[str]) -> dict[str, str]:
    """Names that conflict with others, each with the reason.

    Of names that differ in case or Unicode form only, the plainest is kept. A file whose name is
    the folder of another one is refused, and the other one is kept.
    """
    first: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in sorted(set(names), key=lambda one: (folded(one) != one, one)):
        kept = first.setdefault(folded(name), name)
        if kept != name:
            refused[name] = f"differs from {show_name(kept)} in case or Unicode form only"
    folders = {folder for key in first for folder in _folders(key)}
    for key, name in first.items():
        if key in folders:
            refused[name] = "is a file, and other names have it as their folder"
    return refused


def _folders(name: str) -> Iterable[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def checkpoint_fault(files: Sequence[FileEntry], manifest_name: str) -> str | None:
    """Why a manifest's list of files is refused, with the name of the file; None if it is not.

    The manifest does not list itself, as it cannot contain its own hash.
    """
    if not files:
        return "lists no file"
    if len(files) > MAX_CHECKPOINT_FILES:
        return f"lists {len(files)} files, and the limit is {MAX_CHECKPOINT_FILES}"
    for file in files:
        fault = entry_fault(file) or _plain_name_fault(file.name, manifest_name)
        if fault is not None:
            return f"names the file {show_name(file.name)}, which {fault}"
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        ((twice, _),) = Counter(names).most_common(1)
        return f"names the file {show_name(twice)} twice"
    for name, fault in collisions(names).items():
        return f"names the file {show_name(name)}, which {fault}"
    total = sum(file.size for file in files)
    return None if total <= MAX_SIZE else f"lists {show_number(total)} bytes"


def _plain_name_fault(name: str, manifest_name: str) -> str | None:
    if "/" in name:
        return "is in another folder"
    if folded(name) == folded(manifest_name):
        return "is the manifest itself"
    return "is a part of a file" if is_part(name) else None


def is_part(name: str) -> bool:
    """Whether a component is the name of an incomplete file."""
    return name.startswith(".") and folded(name).endswith(".part")


def beside(name: str, ending: str) -> str:
    """A hidden name for an incomplete file next to its place; hashed where it would be too long."""
    hidden = f".{name}{ending}"
    if len(hidden.encode(errors="surrogateescape")) <= MAX_COMPONENT_BYTES:
        return hidden
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
    return f".{digest[:40]}{ending}"


def show_sign(sign: str) -> str:
    """A character as a person may see it: an escape where it would steer or deceive a terminal."""
    is_shown = sign.isprintable() or unicodedata.category(sign) == "Zs"
    return sign if is_shown else sign.encode("unicode_escape").decode()


def show_name(name: str) -> str:
    """A name for messages: quoted, printable, and not longer than a line."""
    escaped = "".join(
        character
        if character != "\\" and unicodedata.category(character) not in _REFUSED_CATEGORIES
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in name[:_MAX_SHOWN]
    )
    return f"`{escaped}`" if len(name) <= _MAX_SHOWN else f"`{escaped}…` ({len(name)} characters)"


def show_number(number: int) -> str:
    """A number for messages; of one with more digits than Python prints, only its length."""
    return str(number) if number.bit_length() <= 128 else f"of {number.bit_length()} bits"
