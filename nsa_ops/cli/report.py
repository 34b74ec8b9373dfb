"""`report`: a run as one page."""

from pathlib import Path
from typing import Annotated

import typer

from nsa_ops.cli.command import command
from nsa_ops.cli.complete import complete_run
from nsa_ops.cli.session import Session


def register(app: typer.Typer) -> None:
    """Add the command to the root command."""
    command(app, "report")(report)


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
    """Write a self-contained HTML page about a run, and its Markdown twin."""
    from nsa_ops.cli.render_backup import draw_written
    from nsa_ops.report.write import find_run_directory, write_report

    folder = find_run_directory(session.operator, run)
    now = session.operator.clock.unix_s()
    session.show(write_report(folder, out=out, now_unix_s=now), draw_written)
