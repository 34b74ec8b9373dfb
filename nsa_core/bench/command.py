"""What `python -m nsa_core.bench` needs of every bench: flags, rows, a table, a verdict."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_core.rundir.bench_result import Machine


def accept(rows: Sequence[Any]) -> str | None:
    """The verdict of a bench that only measures."""
    del rows
    return None


def tell(line: str) -> None:
    """One line of the story, on stderr."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - this is the terminal


def check_at_least(least: int, flags: Mapping[str, Sequence[int]]) -> None:
    """Refuse sizes that would measure nothing; pure.

    Args:
        least: Limit of all of them.
        flags: Values by the name of their flag.

    Raises:
        ValueError: If one is smaller; the message names its flag.
    """
    for flag, values in flags.items():
        if min(values) < least:
            message = f"{flag} must be at least {least}, got {min(values)}"
            raise ValueError(message)


@dataclass(frozen=True)
class Bench:
    """One word of the command line; its module offers it under the name `BENCH`.

    Attributes:
        summary: What it measures, in one line.
        needs_card: It says nothing without CUDA.
        add_flags: Adds its own flags to the parser.
        measure: Takes the flags and the machine, and yields rows as they are measured, each a
            dataclass of plain values. It raises ValueError for flags that cannot be used.
        header: Heads of the table.
        format_row: One line of the table.
        failure: What the rows prove to be wrong; None if nothing is. It ends the bench with exit
            code 9.
    """

    summary: str
    needs_card: bool
    add_flags: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Machine], Iterator[Any]]
    header: str
    format_row: Callable[[Any], str]
    failure: Callable[[Sequence[Any]], str | None] = accept
