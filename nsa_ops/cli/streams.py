"""Stdout and stderr as they are: an encoding without our signs, a full disk, a reader that left."""

import io
import os
import sys
from contextlib import suppress

import typer

from nsa_ops.errors import OpsError
from nsa_ops.printable import printable


def prepare_streams() -> None:
    """Show a character that the encoding lacks as `?`; a closed stream (`>&-`) takes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 (until the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def close_stdout() -> None:
    """Let what stdout did not take go nowhere, so that the end of Python does not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def warn(line: str) -> None:
    """One line on stderr that `-q` does not silence."""
    with suppress(OSError):  # where stderr takes nothing, nobody can be warned
        typer.echo(f"warning: {printable(line)}", err=True)


def complain(error: OpsError) -> None:
    """What failed and what to do next, on stderr; what people typed is shown, never obeyed."""
    with suppress(OSError):  # where stderr takes nothing, the exit code still tells
        typer.echo(f"error: {printable(error.message)}", err=True)
        if error.hint:
            typer.echo(f"\nhint: {printable(error.hint)}", err=True)
