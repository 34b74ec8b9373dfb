"""A configuration or a path that cannot be used, said in one line."""

from pydantic import ValidationError


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
