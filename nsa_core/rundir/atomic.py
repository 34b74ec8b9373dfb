"""Write a file whole or not at all, and append whole lines, so that a kill leaves nothing torn."""

import errno
import os
import tempfile
from pathlib import Path


def fsync_dir(folder: Path) -> None:
    """Make the names in a folder durable; a rename is only certain after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a file durable, whoever wrote it."""
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
