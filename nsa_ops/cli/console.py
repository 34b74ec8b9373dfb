"""What every command writes: tables, lines, plans, checks or one JSON envelope; errors on stderr.

rich is imported when something is drawn: the help of a command starts without it.
"""

import dataclasses
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import typer

from nsa_ops.errors import OpsError
from nsa_ops.printable import printable_brief

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nsa_core.rundir.report import CheckResult
    from nsa_ops.plan import Plan

SCHEMA_VERSION = 1
_PIPE_WIDTH = 200
_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "unknown": "?", "skipped": "-"}
_COLORS = {"pass": "green", "warn": "yellow", "fail": "red", "unknown": "yellow", "skipped": "dim"}


def envelope(command: str, data: object, error: OpsError | None = None) -> str:
    """`{schema, ok, data, errors}` of a command as one line of JSON, in ASCII for any terminal.

    Args:
        command: Words of the command, such as `pod ls`.
        data: Result; None if there is none.
        error: The error that ended the command, if one did.
    """
    errors = []
    if error is not None:
        errors = [{"message": error.message, "hint": error.hint, "exit_code": error.exit_code}]
    document = {
        "schema": f"nsa-ops/{command.replace(' ', '-')}/{SCHEMA_VERSION}",
        "ok": error is None,
        "data": jsonable(data),
        "errors": errors,
    }
    return json.dumps(document, allow_nan=False)


def jsonable(value: object) -> Any:
    """A result as JSON knows it: records become objects, sequences lists, paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: jsonable(getattr(value, name)) for name in names}
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return jsonable(dump(mode="json"))  # fields that no type here knows may hold anything
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [jsonable(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):  # JSON knows neither NaN nor infinity
        return None
    return value


def make_console(color: str, *, is_color_forbidden: bool) -> "Console":
    """A console on stdout: colour as asked; off a terminal plain, and no line is folded."""
    from rich.console import Console

    probe = Console()
    wanted = color == "always" or (color == "auto" and probe.is_terminal and not is_color_forbidden)
    return Console(
        highlight=False,
        emoji=False,  # `:x:` in a text from a pod is not a picture
        color_system="auto" if wanted else None,  # without one rich writes no bold either
        force_terminal=True if color == "always" else None,
        soft_wrap=not probe.is_terminal and color != "always",  # which asks for a picture
        width=None if probe.is_terminal else _PIPE_WIDTH,
    )


def table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, never_folded: int | None = None
) -> "Table":
    """A plain table: no frame, two spaces between columns; one column may stay whole."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        drawn.add_column(heading, overflow="fold", no_wrap=number == never_folded)
    for row in rows:
        drawn.add_row(*map(cell, row))
    return drawn


def draw_table(
    console: "Console",
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    never_folded: int | None = None,
) -> None:
    """A table that fits a terminal; elsewhere one line a row, which `grep` finds whole."""
    if not console.soft_wrap:
        console.print(table(headings, rows, never_folded=never_folded))
        return
    texts = [list(headings), *([printable_brief(cell_text(one)) for one in row] for row in rows)]
    *widths, _ = (max(map(len, column)) for column in zip(*texts, strict=True))
    for row in texts:
        padded = map(str.ljust, row, [*widths, 0])
        line(console, "  ".join(padded).rstrip())


def cell(value: object) -> str:
    """A value for a cell of a table: its text as it is, neither markup nor control characters."""
    from rich.markup import escape

    return escape(printable_brief(cell_text(value)))


def cell_text(value: object) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell_text(item)}" for key, item in value.items())
    return str(value)


def facts(console: "Console", pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one pair a line; empty values are left out."""
    kept = [pair for pair in pairs if pair[1] is not None and pair[1] != ""]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        line(console, f"{name:<{width}}  {cell_text(value)}")


def line(console: "Console", text: str) -> None:
    """One line of text without markup; control characters are shown as escapes."""
    console.print(printable_brief(text), markup=False, soft_wrap=True)


def plan_lines(plan: "Plan", *, brief: bool = False) -> list[str]:
    """A plan as lines: what, with which command, writing which files; its notes also in brief."""
    lines = [f"plan: {plan.title}"]
    for number, step in enumerate(() if brief else plan.steps, start=1):
        mark = " (done already)" if step.is_done else ""
        lines.append(f"  {number}. {step.name}: {step.detail}{mark}")
        if step.command:
            lines.append(f"     $ {step.shell}")
        lines += [f"     -> {file}" for file in step.files]
    return lines + [f"  note: {note}" for note in plan.notes]


def draw_plan(console: "Console", plan: "Plan") -> None:
    """A plan on stdout."""
    for text in plan_lines(plan):
        line(console, text)


def draw_checks(console: "Console", checks: "Sequence[CheckResult]") -> None:
    """Checks in one table, then what to do about each that did not pass."""
    headings = ["", "CHECK", "FOUND", "LIMIT"]
    rows = [(_MARKS[one.status], one.name, _found_by(one), one.limit) for one in checks]
    if console.soft_wrap:
        draw_table(console, headings, rows)
    else:
        drawn = table(headings, [], never_folded=1)
        for check, (mark, *texts) in zip(checks, rows, strict=True):
            drawn.add_row(f"[{_COLORS[check.status]}]{mark}[/]", *map(cell, texts))
        console.print(drawn)
    for check in checks:
        if check.hint and check.status in {"warn", "fail", "unknown"}:
            line(console, f"{check.name}: {check.hint}")


def _found_by(check: "CheckResult") -> str:
    """The measured value, then the message, unless it contains the value."""
    is_said = not check.measured or check.measured in check.message
    return check.message if is_said else f"{check.measured}: {check.message}"


def can_show(signs: str, encoding: str) -> bool:
    """Whether an encoding has all of these signs."""
    try:
        signs.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def share_of(done: float, total: float) -> float:
    """Part of a total, 0 to 1; the numbers are a pod's, and may be negative or huge."""
    return min(max(done, 0), total) / total if total > 0 else 0.0


def bar(share: float, encoding: str, width: int = 30) -> str:
    """A share of 0 to 1 as a bar, in signs that the encoding has."""
    full, empty = ("█", "░") if can_show("█░", encoding) else ("#", "-")
    num_full = round(min(1.0, max(0.0, share)) * width)
    return full * num_full + empty * (width - num_full)


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
        typer.echo(f"warning: {printable_brief(line)}", err=True)


def complain(error: OpsError) -> None:
    """What failed and what to do next, on stderr; what people typed is shown, never obeyed."""
    with suppress(OSError):  # where stderr takes nothing, the exit code still tells
        typer.echo(f"error: {printable_brief(error.message)}", err=True)
        if error.hint:
            typer.echo(f"\nhint: {printable_brief(error.hint)}", err=True)
