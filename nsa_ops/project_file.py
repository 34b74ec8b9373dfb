"""A project's `nsa-ops.toml`: read only where this very content was trusted, and never for more.

Any folder may hold one: a pulled backup, an unpacked archive, the folder of another user. So it is
not even opened unless its content was trusted once, and then it sets nothing that runs a program,
names a machine's configuration or says where state lives.
"""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.rundir.atomic import write_text
from nsa_ops.printable import printable

PROJECT_FILE = "nsa-ops.toml"
#: In the state folder: what was trusted.
TRUST_NAME = "trusted.json"
#: What a project may decide; a setting that is not here is refused in its file.
PROJECT_SETTINGS = ("pod", "profile", "recipe", "timeout_s", "color")
_MAX_BYTES = 65_536


class Trusted(FrozenModel):
    """Files that were trusted: the sha256 of the content, by absolute path."""

    files: dict[str, str] = {}


@dataclass(frozen=True)
class ProjectFile:
    """A project's settings file.

    Attributes:
        path: Where it is.
        content: Its content where it is trusted; None where it is not read.
        why: Why it is not read; empty if it is.
    """

    path: Path
    content: bytes | None
    why: str = ""

    @property
    def notice(self) -> str:
        """The line for people where it is not read; empty if it is."""
        return f"`{printable(str(self.path))}` is not read: {self.why}" if self.why else ""


def find_project_file(folder: Path, state_dir: Path) -> ProjectFile | None:
    """The nearest project file in a folder or its parents, with its content where it is trusted."""
    path = _find_upward(folder)
    if path is None:
        return None
    trusted = read_trusted(state_dir).files.get(str(path))
    if trusted is None:
        return ProjectFile(path, None, "it is not trusted; see `nsa-ops config trust --help`")
    content, why = read_own(path)
    if not why and hashlib.sha256(content).hexdigest() != trusted:
        why = "it has changed since it was trusted; see `nsa-ops config trust --help`"
    return ProjectFile(path, None, why) if why else ProjectFile(path, content)


def _find_upward(folder: Path) -> Path | None:
    for parent in (folder, *folder.parents):
        path = parent / PROJECT_FILE
        try:
            if path.is_file():
                return path
        except OSError:  # a folder that we may not enter
            continue
    return None


def read_own(path: Path, *, is_link_followed: bool = False) -> tuple[bytes, str]:
    """Content of a settings file that nobody but this user can change; else why it is not one.

    The same open file is judged and read, so that nobody can change it between the two.

    Args:
        path: The file.
        is_link_followed: It may be a symbolic link, as in the user's own folder.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if is_link_followed else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        return b"", "it is a symbolic link" if path.is_symlink() else f"{error.strerror}"
    try:
        if why := _why_unsafe(os.fstat(descriptor)):
            return b"", why
        with os.fdopen(descriptor, "rb", closefd=False) as file:  # which refuses a folder
            content = file.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        return b"", f"it has more than {_MAX_BYTES} bytes"
    return content, ""


def _why_unsafe(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in {os.getuid(), 0}:
        return f"it belongs to user {found.st_uid}, not to you"
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        return f"its mode {mode:o} lets others change it; run `chmod go-w` on it"
    return ""


def read_trusted(state_dir: Path) -> Trusted:
    """What was trusted; nothing if the record cannot be read, so that no project file is read."""
    try:
        return Trusted.model_validate_json((state_dir / TRUST_NAME).read_bytes())
    except (OSError, ValidationError):
        return Trusted()


def write_trusted(state_dir: Path, trusted: Trusted) -> None:
    """Keep what is trusted."""
    write_text(state_dir / TRUST_NAME, trusted.model_dump_json(indent=1) + "\n", mode=0o600)
