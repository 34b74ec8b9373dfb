"""End a command quietly where the reader of its stdout has left, as with `| head`."""

import os
import sys
from collections.abc import Callable

#: What SIGPIPE gives: 128 + 13.
READER_GONE = 141


def run_to_exit_code(main: Callable[[], int]) -> int:
    """Run a command that prints results; its exit code, or 141 if nobody reads them any more."""
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
