"""Write a file whole or not at all, append whole lines, and move aside what hinders that.

A kill leaves nothing torn.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nsa_core.rundir.bounded_json import JsonError, open_regular
from nsa_core.rundir.layout import RunDir


def fsync_dir(folder: Path) -> None:
    """Make the names in a folder durable; a rename is only certain after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a file durable, also one that another process wrote."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def check_place(path: Path) -> None:
    """Refuse a file that could never be written, before its content is made.

    Raises:
        IsADirectoryError: If it is a folder.
        FileNotFoundError: If the folder it would be in does not exist.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, and a file is needed", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))


def write_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file by new content: temporary file beside it, fsync, rename, fsync of the folder.

    Raises:
        OSError: If the disk is full or not writable; the old file is then untouched.
    """
    descriptor, temporary = _begin_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def _begin_beside(path: Path) -> tuple[int, str]:
    """Descriptor and name of a new temporary file; an error names the file that was asked for."""
    try:
        return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, content: str, *, mode: int = 0o644) -> None:
    """Like `write_bytes`, for UTF-8 text."""
    write_bytes(path, content.encode(), mode=mode)


def append_line(path: Path, line: str) -> None:
    """Append one line in a single write; after a torn last line it starts on a line of its own.

    Raises:
        OSError: If the disk is full; a part of the line may then stand at the end, and the next
            append closes it with a newline so that readers can pass over it.
    """
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        torn = False
        if end:
            file.seek(end - 1)
            torn = file.read(1) != b"\n"
        file.write(("\n" if torn else "").encode() + line.encode() + b"\n")


_ASIDE = re.compile(r".+\.aside-[0-9]+", re.DOTALL)


def is_set_aside(name: str) -> bool:
    """Whether a name, or the last part of a path, is one that `move_aside` gives."""
    return _ASIDE.fullmatch(name.rpartition("/")[2]) is not None


def move_aside(path: Path) -> Path:
    """Rename something to the first free `NAME.aside-N` beside it; nothing is deleted.

    Raises:
        OSError: If it cannot be renamed.
    """
    number = 1
    while (target := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return path.rename(target)


def clear_obstacles(run: RunDir, rank: int = 0) -> list[str]:
    """Move aside what has the name of a file of the run and is a folder, a pipe or unreadable.

    A file where a folder belongs is moved as well. Call it under the lock of the run.

    Returns:
        One line for each thing that was moved, or could not be.
    """
    lines = []
    for path, what in _find(run, rank):
        try:
            lines.append(f"{path.name} {what}: renamed to {move_aside(path).name}")
        except OSError as error:
            lines.append(f"{path.name} {what}, and cannot be renamed: {error.strerror}")
    return lines


def _find(run: RunDir, rank: int) -> Iterator[tuple[Path, str]]:
    for folder in (run.checkpoints, run.tensorboard, run.attempt(1).parent):
        if folder.exists() and not folder.is_dir():
            yield folder, "is no folder"
    files = (
        run.heartbeat(rank), run.training_csv, run.validation_csv, run.metrics, run.goodput,
        run.latest, run.known_good, run.reserve, run.final_model, run.events, run.halt, run.config,
        run.anomaly, run.gate_collapse, run.stack_dump(rank), run.hang_report, run.cards, run.exit,
        run.log, run.process, run.watchdog, run.watchdog_log, run.samples, run.env,
        run.rank_process(rank), run.rank_exit(rank),
    )  # fmt: skip
    for file in files:
        fault = _find_fault(file)
        if fault:
            yield file, fault


def _find_fault(file: Path) -> str:
    """Why a file cannot be read, as its first byte shows; empty if it can, or is not there."""
    try:
        with open_regular(file) as opened:
            opened.read(1)
    except FileNotFoundError:
        return ""
    except IsADirectoryError:
        return "is a folder"
    except JsonError:
        return "is no regular file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""
