"""What `python -m nsa_core.bench` needs of every bench: flags, rows, a table, a verdict."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.config.model import MAX_POSITIONS
from nsa_core.rundir.bench_result import Machine


def accept(rows: Sequence[Any]) -> str | None:
    """The verdict of a bench that only measures."""
    del rows
    return None


def check_sizes(least: int, flags: Mapping[str, Sequence[int]]) -> None:
    """Refuse sizes that would measure nothing, and rows of more tokens than the model takes; pure.

    Args:
        least: Lower limit of all of them.
        flags: Values by the name of their flag.

    Raises:
        ValueError: If one is beyond a limit; the message names its flag.
    """
    for flag, values in flags.items():
        if min(values) < least:
            message = f"{flag} must be at least {least}, got {min(values)}"
            raise ValueError(message)
        if flag == "--length" and max(values) > MAX_POSITIONS:
            message = f"{flag} must be at most {MAX_POSITIONS:,}, got {max(values):,}"
            raise ValueError(message)


def without_folders(word: str) -> str:
    """An absolute path, also the value of `KEY=PATH`, as its last part: for what is recorded."""
    key, equals, value = word.rpartition("=")
    return key + equals + Path(value).name if Path(value).is_absolute() else word


def add_repeatable(
    parser: argparse.ArgumentParser, flag: str, meaning: str, **settings: Any
) -> None:
    """Add a flag whose values are collected in a list."""
    parser.add_argument(flag, action="append", help=f"{meaning}; may be repeated", **settings)


def add_count(parser: argparse.ArgumentParser, flag: str, default: int, meaning: str) -> None:
    """Add a flag for a number."""
    parser.add_argument(flag, type=int, default=default, metavar="N", help=meaning)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        head: Its heading.
        width: Characters, right-aligned; 0 for text at the end of a line.
        value: Field of a row, or what makes the value of one.
        form: Format of the value; one that ends in `%` shows a share as `18.0 %`.
    """

    head: str
    width: int
    value: str | Callable[[Any], Any]
    form: str = ""

    def cell(self, row: Any) -> str:
        """The value of a row; `n/a` for None."""
        value = getattr(row, self.value) if isinstance(self.value, str) else self.value(row)
        if value is None:
            return "n/a"
        if self.form.endswith("%"):
            return f"{100 * value:{self.form[:-1]}f} %"
        return format(value, self.form)


@dataclass(frozen=True)
class Table:
    """How the rows of a bench are printed."""

    columns: tuple[Column, ...]

    @property
    def header(self) -> str:
        """The headings."""
        return self._line([column.head for column in self.columns])

    def line(self, row: Any) -> str:
        """One row."""
        return self._line([column.cell(row) for column in self.columns])

    def _line(self, cells: Sequence[str]) -> str:
        padded = zip(self.columns, cells, strict=True)
        return " ".join(text.rjust(one.width) if one.width else f" {text}" for one, text in padded)


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
