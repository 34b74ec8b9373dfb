"""What the commands of nsa_core share: messages on stderr, the flags of a run, a quiet end."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from nsa_core.rundir.names import show_sign

#: What SIGPIPE gives: 128 + 13.
READER_GONE = 141


def tell(line: str) -> None:
    """Print a message on stderr; stdout is for the result."""
    print(shown_on(sys.stderr, line), file=sys.stderr, flush=True)  # noqa: T201 - this is the terminal


def shown_on(stream: TextIO, text: str) -> str:
    """The text as a stream gets it: escapes instead of what could steer or deceive a terminal.

    A model of bytes draws control characters as readily as letters, and whoever made its weights
    chose which.
    """
    if not stream.isatty():
        return text
    return "".join(sign if sign in "\n\t" else show_sign(sign) for sign in text)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a trained model; `evaluate.run_model.open_by_flags` opens it."""
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="DIR", help="run directory")
    add("--step", type=int, help="take the checkpoint of this step instead of the newest")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--tokenizer", type=Path, metavar="DIR", help="staged data folder that holds the tokenizer")


def run_to_exit_code(main: Callable[[], int]) -> int:
    """Run a command that prints results; its exit code, or 141 if nobody reads them any more.

    So `| head` ends a command without a traceback.
    """
    try:
        code = _code_of(main)
        print(end="", flush=True)  # noqa: T201 - what is left; a closed stdout takes nothing
    except BrokenPipeError:
        _let_stdout_go_nowhere()
        return READER_GONE
    return code


def _code_of(main: Callable[[], int]) -> int:
    try:
        return main()
    except SystemExit as ended:  # argparse ends by itself after --help
        if isinstance(ended.code, int):
            return ended.code
        raise


def _let_stdout_go_nowhere() -> None:
    """So that the end of Python does not try again to write what nobody took."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
