"""`provision`: a bare machine becomes a pod."""

from pathlib import Path
from typing import Annotated

import typer

from nsa_ops.cli.arguments import PodArgument, ProfileOption
from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session


def register(app: typer.Typer) -> None:
    """Add the command to the root command."""
    command(app, "provision", changes=True)(provision)


def provision(
    session: Session,
    pod: PodArgument = None,
    profile: ProfileOption = None,
    flash_attention: Annotated[
        Path | None,
        typer.Option("--with-flash-attn", metavar="WHEEL", help="flash-attn wheel to install"),
    ] = None,
) -> None:
    """Install what a run needs on a pod; a second time, or after a cut, only what is missing."""
    from nsa_ops.cli.render_provision import draw_provisioned
    from nsa_ops.provision.provisioning import execute_provision, plan_provision

    planned = plan_provision(session.operator, pod, profile or "", flash_attention)
    session.agree(planned.plan)
    session.interrupt_note = "repeat it: it goes on where it stopped"
    session.show(execute_provision(session.operator, planned), draw_provisioned)
