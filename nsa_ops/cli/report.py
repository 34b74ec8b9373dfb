"""`report`: a run as one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import complete_run
from nsa_ops.cli.command import command
from nsa_ops.cli.console import facts, line
from nsa_ops.cli.session import Session

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.report.write import WrittenReport


commands = typer.Typer()


@command(commands, "report")
def report(
    session: Session,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|PATH", help="Run id, run directory or backup", autocompletion=complete_run
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="HTML file, or a folder for it")
    ] = Path(),
) -> None:
    """Write a report about a run: a self-contained HTML page, and the same as Markdown."""
    from nsa_ops.report.write import find_run_directory, write_report

    folder = find_run_directory(session.operator, run)
    now = session.operator.clock.unix_s()
    session.show(write_report(folder, out=out, now_unix_s=now), draw_written)


def draw_written(console: "Console", written: "WrittenReport") -> None:
    """Where the report is, and the outcome in one sentence."""
    line(console, written.outcome)
    facts(console, [("page", str(written.page)), ("markdown", str(written.markdown))])
    for missing in written.missing:
        line(console, f"missing: {missing}")
