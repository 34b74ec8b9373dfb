"""What must stay as it is: a whole tree by name, type, mode, content and link, and what changed."""

# Names that are no text are looked at, too.
# ruff: noqa: PTH115, PTH118, PTH123

import hashlib
import json
import os
import stat
import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from nsa_ops.store import Receipt

Tree = dict[str, tuple[str, ...]]

#: What every command may write on the laptop, below its folder: records of its own acts.
RECORDS = (
    "state",  # the time stamp is not looked at; its mode is
    "state/registry.sqlite*",
    "state/audit*",
    "state/*.lock",
    "state/sockets",
    "state/backups/.*.lock",
)
_LARGE = 2**28


def look(root: Path) -> Tree:
    """Every entry below a folder, links not followed."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = _facts(path)
    return found


def _facts(path: str) -> tuple[str, ...]:
    facts = os.lstat(path)
    mode = f"{facts.st_mode:o}"
    if stat.S_ISLNK(facts.st_mode):
        return (mode, os.readlink(path))
    if not stat.S_ISREG(facts.st_mode):
        return (mode,)
    if facts.st_size > _LARGE:
        return (mode, f"{facts.st_size} bytes")
    with open(path, "rb") as file:
        return (mode, hashlib.file_digest(file, "sha256").hexdigest())


def changed(before: Tree, after: Tree, may_change: Iterable[str] = ()) -> list[str]:
    """Names whose facts differ, apart from those that may."""
    names = (name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    allowed = tuple(may_change)
    return sorted(name for name in names if not any(fnmatch(name, one) for one in allowed))


def below(tree: Tree, folder: str) -> Tree:
    return {name: facts for name, facts in tree.items() if name.startswith(f"{folder}/")}


def disk_bytes(root: Path) -> int:
    """Bytes that files below a folder take on the disk."""
    found = 0
    for folder, _, files in os.walk(root):
        found += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in files)
    return found


def controls(content: bytes) -> list[str]:
    """Control characters in an output, apart from newline and tab; not UTF-8 counts as one."""
    said = content.decode(errors="surrogateescape")
    return sorted(
        {repr(sign) for sign in said if sign not in "\n\t" and unicodedata.category(sign) in _RAW}
    )


_RAW = ("Cc", "Cs")


def flaws(backup: Path, receipts: Iterable[Receipt]) -> list[str]:
    """Everything in a backup that a pod must never be able to put there."""
    found = [flaw for name, facts in look(backup).items() for flaw in _name_flaws(name, facts)]
    for checkpoint in sorted((backup / "checkpoints").glob("step_*")):
        found += _checkpoint_flaws(checkpoint)
    for receipt in receipts:
        path = Path(receipt.path) / "checkpoint.json"
        if Path(receipt.path).parents[1] != backup:
            continue
        if not path.is_file():
            found.append(f"the receipt of step {receipt.step} names a checkpoint that is not there")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != receipt.manifest_sha256:
            found.append(f"the receipt of step {receipt.step} names other content")
    return found


def _name_flaws(name: str, facts: tuple[str, ...]) -> list[str]:
    mode = int(facts[0], 8)
    found = []
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        found.append(f"{name!r} is neither a file nor a folder")
    if any(unicodedata.category(sign) in _RAW for sign in name):
        found.append(f"{name!r} holds control characters or is not UTF-8")
    return found


def _checkpoint_flaws(folder: Path) -> list[str]:
    """A folder under a checkpoint's own name holds exactly what its manifest says."""
    try:
        manifest = json.loads((folder / "checkpoint.json").read_bytes())
        files = {one["name"]: one for one in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"{folder.name} has no manifest that can be read: {type(error).__name__}"]
    there = {path.name for path in folder.iterdir()} - {"checkpoint.json"}
    found = [f"{folder.name} holds {sorted(there)}"] if there != set(files) else []
    for name in there & set(files):
        content = (folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
            found.append(f"{folder.name}/{name} is not what its manifest says")
        if len(content) != files[name]["size"]:
            found.append(f"{folder.name}/{name} has {len(content)} bytes")
    return found
