"""Files that a person named: read one, or refuse a place where none can be written."""

from pathlib import Path

from nsa_core.rundir.atomic import check_place
from nsa_ops.errors import ConfigurationError, LocalResourceError, NotFoundError


def read_named(path: Path, what: str, *, hint: str = "Check the path") -> bytes:
    """The content of a file.

    Args:
        path: As it was typed.
        what: What the message calls it, such as `Log`.
        hint: What to do where it is not there or no file.

    Raises:
        NotFoundError: If there is no such file.
        ConfigurationError: If it is a folder.
        LocalResourceError: If it may not or cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{what} `{path}` does not exist"
        raise NotFoundError(message, hint=hint) from error
    except IsADirectoryError as error:
        message = f"{what} `{path}` is a folder, and a file is needed"
        raise ConfigurationError(message, hint=hint) from error
    except OSError as error:
        message = f"{what} `{path}` cannot be read: {error.strerror or error}"
        raise LocalResourceError(message, hint=f"See `ls -l {path}`") from error


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
