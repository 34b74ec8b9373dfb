"""Files of this laptop: the private state folder, and files that somebody named on a command line.

The state folder has mode 0700 and what is in it 0600, whatever the umask is. A folder of an earlier
version, or one that others may enter, is closed at the next start. What belongs to another user is
refused: its owner could change it meanwhile.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nsa_core.rundir.atomic import check_place
from nsa_ops.errors import ConfigurationError, LocalResourceError, NotFoundError
from nsa_ops.quantities import format_bytes

#: What nobody else may do: read, write, enter.
OTHERS = 0o077
#: A log of a million steps has less, and what judges it holds several copies of it in memory.
_MOST_BYTES = 256 * 2**20


def expand_home(path: str | Path) -> Path:
    """A path that begins with `~` or `~USER`, in full.

    Raises:
        ConfigurationError: If there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        message = f"`{user}` in `{path}` is the home of no user of this machine"
        raise ConfigurationError(message, hint=f"A folder of that name is `./{path}`") from error


@dataclass
class Closing:
    """The result of closing a folder to other users.

    Attributes:
        num_closed: Files and folders that were open, and are not any more.
        still_open: Those that could not be closed, with the system's words.
    """

    num_closed: int = 0
    still_open: dict[str, str] = field(default_factory=dict)

    @property
    def notice(self) -> str:
        """A warning if something stays open to others; else empty."""
        if not self.still_open:
            return ""
        path, why = next(iter(self.still_open.items()))
        more = f" and {len(self.still_open) - 1} more" if len(self.still_open) > 1 else ""
        return f"other users can read `{path}`{more}, and this cannot be changed: {why}"


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can enter, or close one that is there.

    Raises:
        LocalResourceError: If it is no folder of this user.
        OSError: If it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_own(folder)
    close_to_others(folder)


def _require_own(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid == os.getuid():
        return
    message = f"`{folder}` belongs to user {found.st_uid}, but you are user {os.getuid()}"
    raise LocalResourceError(
        message, hint="Run it as the owner, without sudo: that user's registry knows the runs"
    )


def close_to_others(path: Path) -> bool:
    """Remove all permissions of other users; returns whether there were any.

    Raises:
        OSError: If it cannot be changed.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS:
        path.chmod(mode & ~OTHERS)
    return bool(mode & OTHERS)


def create_private(path: Path) -> None:
    """Make an empty file with 0600 where there is none; sqlite gives its journals the same.

    A file that is there is never opened: to close it would give up every lock that sqlite holds on
    it in this process, and another command could then write over what this one has written.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def close_tree(folder: Path) -> Closing:
    """Close a state folder of this user and all that is in it; links are not followed.

    Raises:
        LocalResourceError: If it belongs to another user.
    """
    found = Closing()
    if not folder.is_dir():
        return found
    _require_own(folder)
    for path, mode in _open_to_others(str(folder)):
        try:
            os.chmod(path, mode & ~OTHERS)  # noqa: PTH101 (a string from scandir; thousands of them)
        except FileNotFoundError:  # another command has moved it
            continue
        except OSError as error:
            found.still_open[path] = error.strerror or str(error)
        else:
            found.num_closed += 1
    return found


def list_open(folder: Path) -> list[str]:
    """Files and folders in a state folder that other users can access; changes nothing."""
    return [path for path, _ in _open_to_others(str(folder))] if folder.is_dir() else []


def _open_to_others(folder: str) -> Iterator[tuple[str, int]]:
    """Everything in a tree that other users can access, with its mode; the folder itself first."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 (as above)
            if mode & OTHERS:
                yield path, stat.S_IMODE(mode)
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if mode & OTHERS and not entry.is_symlink():
                        yield entry.path, stat.S_IMODE(mode)
        except (FileNotFoundError, PermissionError):  # moved meanwhile, or closed to us too
            continue


def read_named(
    path: Path, what: str, *, hint: str = "Check the path", max_bytes: int = _MOST_BYTES
) -> bytes:
    """The content of a file, or of what is piped in under its name; a device never ends.

    Args:
        path: As it was typed.
        what: What the message calls it, such as `Log`.
        hint: What to do where it is not there or no file.
        max_bytes: The most that is read.

    Raises:
        NotFoundError: If there is no such file.
        ConfigurationError: If it is a folder, or has more bytes.
        LocalResourceError: If it may not or cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{what} `{path}` does not exist"
        raise NotFoundError(message, hint=hint) from error
    except IsADirectoryError as error:
        message = f"{what} `{path}` is a folder, and a file is needed"
        raise ConfigurationError(message, hint=hint) from error
    except OSError as error:
        message = f"{what} `{path}` cannot be read: {error.strerror or error}"
        raise LocalResourceError(message, hint=f"See `ls -l {path}`") from error
    if len(content) > max_bytes:
        message = f"{what} `{path}` has more than {format_bytes(max_bytes)}"
        raise ConfigurationError(message, hint="Give a part of it, such as its last lines")
    return content


def check_writable_place(path: Path, flag: str) -> None:
    """Refuse a file that could never be written, before minutes are spent on its content.

    Raises:
        ConfigurationError: If it is a folder.
        NotFoundError: If the folder it would be in does not exist.
    """
    try:
        check_place(path)
    except IsADirectoryError as error:
        message = f"`{flag} {path}` {error.strerror}"
        raise ConfigurationError(message, hint=f"Write `{flag} {path / 'NAME'}`") from error
    except FileNotFoundError as error:
        message = f"`{flag} {path}` cannot be written: {error.strerror}"
        raise NotFoundError(message, hint=f"Make it: `mkdir -p {path.parent}`") from error
