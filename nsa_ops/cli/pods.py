"""Commands about pods: add, trust, enter, list, show, forget."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import PodArgument, ProfileOption, complete_pod
from nsa_ops.cli.command import command
from nsa_ops.cli.console import draw_table, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError
from nsa_ops.quantities import format_time

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.pods.known import PodDetails
    from nsa_ops.store import PodRecord, RunRecord

pod_group = typer.Typer(name="pod", help="The machines that runs live on.")

FingerprintOption = Annotated[
    str | None,
    typer.Option("--fingerprint", metavar="SHA256:…", help="Expected host key; skips the prompt"),
]


@command(pod_group, "add", changes=True)
def pod_add(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Your name for the pod")],
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="`user@host[:port]`, `local` or `local:ROOT`"),
    ] = None,
    from_ssh_config: Annotated[
        str | None,
        typer.Option(
            "--from-ssh-config", metavar="ALIAS", help="Host alias in your ssh configuration"
        ),
    ] = None,
    transport: Annotated[
        str, typer.Option("--transport", metavar="ssh|fabric", help="How to reach the pod")
    ] = "ssh",
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="FOLDER", help="Folder on the pod for code, runs and data"),
    ] = None,
    fingerprint: FingerprintOption = None,
    profile: ProfileOption = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Python interpreter for training")
    ] = None,
    password_from: Annotated[
        str | None,
        typer.Option(
            "--password-from",
            metavar="FILE|-|ask",
            help="Log in by password once, to install your public key; `-` is stdin",
        ),
    ] = None,
) -> None:
    """Add a pod: a machine behind ssh, whose host key is shown and pinned, or this machine."""
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
        message = f"`{flag}` is for a pod behind ssh, but `local` is this machine"
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
        message = (
            "The password cannot be asked for: stdin is no terminal, or `--no-input` was given"
        )
        raise ConfigurationError(message, hint="Give it on stdin with `--password-from -`")
    return str(typer.prompt("Password of the new pod", hide_input=True, err=True))


@command(pod_group, "trust", changes=True)
def pod_trust(
    session: Session, pod: PodArgument = None, fingerprint: FingerprintOption = None
) -> None:
    """Pin the host key that the pod shows now; the pod then has a new identity."""
    from nsa_ops.pods.ssh_pods import execute_trust, plan_trust

    planned = plan_trust(session.operator, pod, fingerprint or "")
    session.agree(planned.plan, is_reversible=planned.is_agreed)
    session.show(execute_trust(session.operator, planned), draw_pod)


@command(pod_group, "ssh", is_emergency=True)
def pod_ssh(session: Session, pod: PodArgument = None) -> None:
    """Open a terminal on a pod; its host key must be the pinned one."""
    from nsa_ops.pods.ssh_pods import open_terminal

    raise typer.Exit(open_terminal(session.operator, pod))


@command(pod_group, "ls", is_emergency=True)
def pod_ls(session: Session) -> None:
    """List the pods that this laptop knows."""
    session.show(session.operator.store.pods(), draw_pods)


@command(pod_group, "show", is_emergency=True)
def pod_show(session: Session, pod: PodArgument = None) -> None:
    """Show a pod and the runs that were launched on it."""
    from nsa_ops.pods.known import show_pod

    session.show(show_pod(session.operator, pod), draw_pod_details)


@command(pod_group, "rm", changes=True)
def pod_rm(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="POD", help="Pod to forget", autocompletion=complete_pod)
    ],
) -> None:
    """Forget a pod; nothing on the pod changes."""
    from nsa_ops.pods.known import execute_remove, plan_remove

    pod, plan = plan_remove(session.operator.store, name)
    session.agree(plan, is_reversible=False)
    session.show(execute_remove(session.operator, pod), draw_forgotten)


def draw_pod(console: "Console", pod: "PodRecord", fingerprint: str = "") -> None:
    """One pod, and the fingerprint of its pinned host key if it is known."""
    host_key = [("host key", fingerprint)] if fingerprint else []
    facts(
        console,
        [
            ("pod", pod.name),
            ("is", "this machine" if pod.kind == "local" else f"{pod.kind} to {pod.address}"),
            ("root", pod.root),
            ("python", pod.python),
            ("profile", pod.profile or "not set"),
            ("added", format_time(pod.added_unix_s)),
            *host_key,
        ],
    )


def draw_pods(console: "Console", pods: "list[PodRecord]") -> None:
    """Pods in a table."""
    if not pods:
        line(console, "no pods; add this machine with `nsa-ops pod add here local`")
        return
    rows = [(pod.name, pod.kind, pod.address or "-", pod.profile or "-", pod.root) for pod in pods]
    draw_table(console, ["POD", "KIND", "ADDRESS", "PROFILE", "ROOT"], rows)


def draw_pod_details(console: "Console", details: "PodDetails") -> None:
    """A pod and its runs."""
    draw_pod(console, details.pod, details.fingerprint)
    draw_run_records(console, details.runs)


def draw_forgotten(console: "Console", pod: "PodRecord") -> None:
    """The pod that is forgotten now."""
    line(console, f"forgot pod {pod.name}; its files stay in {pod.root}")


def draw_run_records(console: "Console", runs: "list[RunRecord]") -> None:
    """Runs as the registry knows them."""
    if not runs:
        line(console, "no runs yet")
        return
    rows = [
        (run.run_id, run.pod, run.recipe, run.profile, format_time(run.launched_unix_s))
        for run in runs
    ]
    draw_table(console, ["RUN", "POD", "RECIPE", "PROFILE", "LAUNCHED"], rows)
