"""Commands about pods: add, list, show, forget."""

from typing import Annotated

import typer

from nsa_ops.cli.arguments import PodArgument, ProfileOption
from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session

pod_group = typer.Typer(help="The machines that runs live on.")


def register(app: typer.Typer) -> None:
    """Add these commands to the root."""
    app.add_typer(pod_group, name="pod")


@command(pod_group, "add", path="pod", changes=True)
def pod_add(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Your name for it")],
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="`local` or `local:ROOT`")],
    profile: ProfileOption = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Interpreter that trains there")
    ] = None,
) -> None:
    """Add a pod; `local` makes this machine one."""
    from nsa_ops.cli.render import draw_pod
    from nsa_ops.runs.pods import execute_add, plan_add

    pod, plan = plan_add(
        session.operator, name, address, profile=profile or "", python=python or ""
    )
    session.agree(plan)
    session.show(execute_add(session.operator, pod, plan), draw_pod)


@command(pod_group, "ls", path="pod")
def pod_ls(session: Session) -> None:
    """List the pods this machine knows."""
    from nsa_ops.cli.render import draw_pods

    session.show(session.operator.store.pods(), draw_pods)


@command(pod_group, "show", path="pod")
def pod_show(session: Session, pod: PodArgument = None) -> None:
    """Show a pod and the runs that were launched on it."""
    from nsa_ops.cli.render import draw_pod_details
    from nsa_ops.runs.pods import show_pod

    session.show(show_pod(session.operator, pod), draw_pod_details)


@command(pod_group, "rm", path="pod", changes=True)
def pod_rm(
    session: Session, name: Annotated[str, typer.Argument(metavar="NAME", help="Pod to forget")]
) -> None:
    """Forget a pod; nothing on the pod is touched."""
    from nsa_ops.cli.render import draw_forgotten
    from nsa_ops.runs.pods import execute_remove, plan_remove

    pod, plan = plan_remove(session.operator.store, name)
    session.agree(plan, is_reversible=False)
    session.show(execute_remove(session.operator, pod), draw_forgotten)
