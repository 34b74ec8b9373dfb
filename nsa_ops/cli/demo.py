"""`demo`: the whole path on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session


def register(app: typer.Typer) -> None:
    """Add the command to the root command."""
    command(app, "demo")(demo)


def demo(
    session: Session,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder that gets everything it makes")
    ] = Path("nsa-demo"),
) -> None:
    """Walk the whole path on this machine: no GPU, no network, no SSH."""
    from nsa_ops.cli.render_demo import draw_demo
    from nsa_ops.demo import demo_settings, prepare_folder, run_demo

    folder = folder.absolute()
    prepare_folder(folder)
    session.interrupt_note = f"see `NSA_OPS_STATE_DIR={folder / 'state'} nsa-ops status`"
    operator = session.operator_of(demo_settings(session.settings, folder))
    try:
        session.show(run_demo(operator, folder), draw_demo)
    finally:
        operator.store.close()
