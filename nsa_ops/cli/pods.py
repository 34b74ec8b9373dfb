"""Commands about pods: add, trust, enter, list, show, forget."""

import sys
from typing import Annotated

import typer

from nsa_ops.cli.arguments import PodArgument, ProfileOption
from nsa_ops.cli.command import command
from nsa_ops.cli.complete import complete_pod
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError

pod_group = typer.Typer(help="The machines that runs live on.")


def register(app: typer.Typer) -> None:
    """Add these commands to the root."""
    app.add_typer(pod_group, name="pod")


FingerprintOption = Annotated[
    str | None,
    typer.Option("--fingerprint", metavar="SHA256:…", help="Host key that must answer; asks not"),
]


@command(pod_group, "add", path="pod", changes=True)
def pod_add(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Your name for it")],
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="`user@host[:port]`, `local` or `local:ROOT`"),
    ] = None,
    from_ssh_config: Annotated[
        str | None,
        typer.Option("--from-ssh-config", metavar="ALIAS", help="A host of your ssh configuration"),
    ] = None,
    transport: Annotated[
        str, typer.Option("--transport", metavar="ssh|fabric", help="How it is reached")
    ] = "ssh",
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="FOLDER", help="Folder on the pod for code, runs and data"),
    ] = None,
    fingerprint: FingerprintOption = None,
    profile: ProfileOption = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Interpreter that trains there")
    ] = None,
    password_from: Annotated[
        str | None,
        typer.Option(
            "--password-from",
            metavar="FILE|-|ask",
            help="Enter by password once and put your key there; - is stdin",
        ),
    ] = None,
) -> None:
    """Add a pod: a machine behind ssh, whose host key is shown and pinned, or this one."""
    from nsa_ops.cli.render import draw_pod
    from nsa_ops.pods.known import execute_add, is_local, plan_add
    from nsa_ops.pods.ssh_pods import (
        SshPodRequest,
        choose_address,
        execute_add_ssh,
        plan_add_ssh,
    )

    where = choose_address(address, from_ssh_config)
    if is_local(where):
        _refuse_ssh_flags(transport=transport, fingerprint=fingerprint, password=password_from)
        pod, plan = plan_add(
            session.operator,
            name,
            where,
            root=root or "",
            profile=profile or "",
            python=python or "",
        )
        session.agree(plan)
        session.show(execute_add(session.operator, pod, plan), draw_pod)
        return
    request = SshPodRequest(
        name=name,
        address=where,
        kind=transport,
        root=root or "",
        python=python or "",
        profile=profile or "",
        fingerprint=fingerprint or "",
        has_password=password_from is not None,
    )
    planned = plan_add_ssh(session.operator, request)
    session.agree(planned.plan, is_reversible=planned.is_agreed)
    password = _password(session, password_from) if planned.public_key else ""
    session.show(execute_add_ssh(session.operator, planned, password), draw_pod)


def _refuse_ssh_flags(*, transport: str, fingerprint: str | None, password: str | None) -> None:
    """Raise ConfigurationError at a flag that means nothing for this machine."""
    given = {
        "--transport": transport != "ssh",
        "--fingerprint": fingerprint is not None,
        "--password-from": password is not None,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        message = f"`{flag}` is for a pod behind ssh, and `local` is this machine"
        raise ConfigurationError(message, hint=f"Leave `{flag}` out, or give `user@host[:port]`")


def _password(session: Session, source: str | None) -> str:
    """The password of a new pod: asked for unseen, or from where it is kept.

    Raises:
        ConfigurationError: If nobody can be asked.
    """
    from nsa_ops.pods.first_login import read_password

    if source != "ask":
        return read_password(source or "", sys.stdin)
    if session.options.no_input or not sys.stdin.isatty():
        message = "The password is to be asked for, and nobody can be asked"
        raise ConfigurationError(message, hint="Give it on stdin with `--password-from -`")
    return str(typer.prompt("Password of the new pod", hide_input=True, err=True))


@command(pod_group, "trust", path="pod", changes=True)
def pod_trust(
    session: Session, pod: PodArgument = None, fingerprint: FingerprintOption = None
) -> None:
    """Pin the host key that answers now; the pod then has a new identity."""
    from nsa_ops.cli.render import draw_pod
    from nsa_ops.pods.ssh_pods import execute_trust, plan_trust

    planned = plan_trust(session.operator, pod, fingerprint or "")
    session.agree(planned.plan, is_reversible=planned.is_agreed)
    session.show(execute_trust(session.operator, planned), draw_pod)


@command(pod_group, "ssh", path="pod", is_emergency=True)
def pod_ssh(session: Session, pod: PodArgument = None) -> None:
    """Open a terminal on a pod, with its pinned host key."""
    from nsa_ops.pods.ssh_pods import open_terminal

    raise typer.Exit(open_terminal(session.operator, pod))


@command(pod_group, "ls", path="pod", is_emergency=True)
def pod_ls(session: Session) -> None:
    """List the pods this machine knows."""
    from nsa_ops.cli.render import draw_pods

    session.show(session.operator.store.pods(), draw_pods)


@command(pod_group, "show", path="pod", is_emergency=True)
def pod_show(session: Session, pod: PodArgument = None) -> None:
    """Show a pod and the runs that were launched on it."""
    from nsa_ops.cli.render import draw_pod_details
    from nsa_ops.pods.known import show_pod

    session.show(show_pod(session.operator, pod), draw_pod_details)


@command(pod_group, "rm", path="pod", changes=True)
def pod_rm(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="POD", help="Pod to forget", autocompletion=complete_pod)
    ],
) -> None:
    """Forget a pod; nothing on the pod is touched."""
    from nsa_ops.cli.render import draw_forgotten
    from nsa_ops.pods.known import execute_remove, plan_remove

    pod, plan = plan_remove(session.operator.store, name)
    session.agree(plan, is_reversible=False)
    session.show(execute_remove(session.operator, pod), draw_forgotten)
