"""The command `export`: a run for an engine that runs jobs already."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import (
    OverrideOption,
    ProfileOption,
    RecipeOption,
    SetOption,
    choice_of,
    complete_run,
)
from nsa_ops.cli.command import command
from nsa_ops.cli.console import facts, line
from nsa_ops.cli.session import Session
from nsa_ops.quantities import count_of

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.export.export import Exported

commands = typer.Typer()
_ENGINES = ("skypilot", "dstack", "slurm", "kubernetes")


def _complete_engine(incomplete: str) -> list[str]:
    return [engine for engine in _ENGINES if engine.startswith(incomplete)]


@command(commands, "export")
def export(
    session: Session,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(_ENGINES),
            help="Engine that will run it",
            autocompletion=_complete_engine,
        ),
    ],
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|PATH",
            help="Run, run directory or backup whose configuration is used",
            autocompletion=complete_run,
        ),
    ] = None,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, metavar="N", help="Nodes, each with `runtime.num_gpus`"),
    ] = None,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="Container image with the packages")
    ] = "",
    run_id: Annotated[str, typer.Option("--run-id", metavar="ID", help="Name of the new run")] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Default: named after the run, in this folder"
        ),
    ] = None,
    override: OverrideOption = None,
) -> None:
    """Write what SkyPilot, dstack, Slurm or Kubernetes runs: a new run of a recipe or of RUN."""
    from nsa_ops.export.export import ExportRequest, export_run
    from nsa_ops.preflight.guardrails import parse_overrides

    request = ExportRequest(
        engine=to,
        choice=choice_of(recipe, profile, sets),
        run=run or "",
        run_id=run_id,
        num_nodes=nodes,
        image=image,
        output=output,
        overrides=parse_overrides(override or ()),
        command=sys.argv,
    )
    session.show(export_run(session.operator, request), draw_exported)


def draw_exported(console: "Console", exported: "Exported") -> None:
    """The files, and the next command."""
    cards = f", {count_of(exported.gpus_per_node, 'card')} each" if exported.gpus_per_node else ""
    line(
        console,
        f"run {exported.run_id} for {exported.engine}: {count_of(exported.nodes, 'node')}{cards}",
    )
    facts(
        console,
        [
            ("file", str(exported.file)),
            ("code", str(exported.code)),
            ("next", f"edit the lines with `edit`, then `{exported.start}`"),
        ],
    )
    for note in exported.notes:
        line(console, f"note: {note}")
