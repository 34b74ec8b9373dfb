"""Commands about what this laptop has done: the audit log, and acts that were cut off."""

from typing import Annotated

import typer

from nsa_ops.cli.command import command
from nsa_ops.cli.complete import complete_pod
from nsa_ops.cli.session import Session


def register(app: typer.Typer) -> None:
    """Add these commands to the root."""
    command(app, "audit")(audit)
    command(app, "reconcile", changes=True)(reconcile)


def audit(
    session: Session,
    pod: Annotated[
        str,
        typer.Option("--pod", metavar="POD", help="Only of this pod", autocompletion=complete_pod),
    ] = "",
    call: Annotated[
        str, typer.Option("--call", metavar="run|put|get|stream|tail|rsync", help="Only such calls")
    ] = "",
    text: Annotated[
        str, typer.Option("--text", metavar="TEXT", help="Only what has this text in it")
    ] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only what failed")] = False,
    last: Annotated[
        int, typer.Option("--last", min=0, metavar="N", help="The newest N; 0 shows all")
    ] = 20,
) -> None:
    """Show the log of every command on a pod, and check that it is whole; exit code 9 if not."""
    from nsa_ops.cli.render_upkeep import draw_audit
    from nsa_ops.context import AUDIT_NAME, audit_log
    from nsa_ops.laptop.audit_log import AuditQuery, is_pod_unseen, read_audit, refusal_of
    from nsa_ops.pods.known import choose_pod

    session.close_state(session.settings)
    path = session.settings.state_dir / AUDIT_NAME
    head = audit_log(session.settings).head
    view = read_audit(path, AuditQuery(pod, call, text, failed, last), head)
    if not view.entries and is_pod_unseen(path, pod):
        choose_pod(session.operator.store, pod)  # refuses a name that is no pod's
    session.show(view, draw_audit, failure=refusal_of(view))


def reconcile(session: Session) -> None:
    """Compare each act that was cut off with its pod; finish it or roll it back."""
    from nsa_ops.cli.render_upkeep import draw_settled
    from nsa_ops.runs.reconcile import execute_reconcile, plan_reconcile, unsettled

    planned = plan_reconcile(session.operator)
    session.agree(planned.plan)
    session.interrupt_note = "repeat it: each act is settled once"
    settled = execute_reconcile(session.operator, planned)
    session.show(settled, draw_settled, failure=unsettled(settled))
