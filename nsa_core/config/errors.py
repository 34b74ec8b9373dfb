"""A configuration or a path that cannot be used, said in one line."""

import errno

from pydantic import ValidationError

#: What to do about a file or disk that refused, by the number of the error.
_ADVICE = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "Free space: the quota of this user is used up",
    errno.EROFS: "Mount the file system for writing: it is read-only",
    errno.EACCES: "Give this user the right to write there",
    errno.EPERM: "Give this user the right to write there",
    errno.EIO: "Look at `dmesg`: the disk fails",
}


class ConfigError(ValueError):
    """A recipe, profile, flag or variable that cannot be used; the message names it and the fix."""


class VariableError(ConfigError):
    """An NSA_* variable that is not known, or whose value cannot be read."""


def one_line(error: OSError | ValueError) -> str:
    """What is wrong: the path and why, the first bad field and why, or the first line; pure."""
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        return f"{path}: {error.strerror}" if path else str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    return str(error).strip().partition("\n")[0]


def disk_advice(error: OSError) -> str:
    """What to do about a file or a disk that refused, as the beginning of a hint; pure."""
    return _ADVICE.get(error.errno or 0, "Look at that path, its rights and its disk")
