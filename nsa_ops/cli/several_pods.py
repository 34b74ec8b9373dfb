"""What `launch`, `halt` and `resume` do for a run on several pods: plan, agree, carry out."""

from dataclasses import replace
from typing import TYPE_CHECKING

from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError

if TYPE_CHECKING:
    from nsa_ops.fleet.halt import FleetHalted
    from nsa_ops.fleet.source import FleetResumeRequest
    from nsa_ops.runs.launch import Launched, LaunchRequest
    from nsa_ops.runs.resume import Resumed
    from nsa_ops.store import RunRecord


def refuse_both(pod: str | None, pods: str | None) -> None:
    """Raise ConfigurationError if both `--pod` and `--pods` were given."""
    if pod is not None and pods is not None:
        message = "`--pod` names one pod, and `--pods` several"
        raise ConfigurationError(message, hint="Leave out `--pod`")


def refuse_port(port: int | None) -> None:
    """Raise ConfigurationError if `--port` was given for a run on one pod."""
    if port is not None:
        message = "`--port` is where the ranks of several pods meet, and the run has one pod"
        raise ConfigurationError(message, hint="Leave it out, or name the pods with `--pods a,b`")


def launch_on(
    session: Session, request: "LaunchRequest", pods: str, port: int | None, *, is_provisioned: bool
) -> "Launched":
    """Launch on the pods of `--pods`, each provisioned first if that is asked for."""
    from nsa_ops.fleet.alike import check_pods
    from nsa_ops.fleet.launch import execute_fleet, plan_fleet
    from nsa_ops.runs.launch import make_ready

    refuse_both(request.pod, pods)
    names = check_pods(pods.split(","))
    if is_provisioned:
        session.interrupt_note = "repeat it to continue where it stopped"
        for name in names:
            make_ready(session.operator, replace(request, pod=name), session.agree)
    planned = plan_fleet(session.operator, request, names, port)
    session.agree(planned.plan)
    run_id = planned.members[0].run.run_id
    session.interrupt_note = f"see `nsa-ops status {run_id}` for whether it started"
    return execute_fleet(session.operator, planned)


def halt_all(session: Session, record: "RunRecord", reason: str) -> "FleetHalted":
    """Halt a run on all its pods."""
    from nsa_ops.fleet.halt import execute_fleet_halt, plan_fleet_halt

    planned = plan_fleet_halt(session.operator, record, reason)
    session.agree(planned.plan)
    session.interrupt_note = "the stop request remains; see `nsa-ops status`"
    return execute_fleet_halt(session.operator, planned)


def resume_on(session: Session, request: "FleetResumeRequest", *, prove: bool = False) -> "Resumed":
    """Resume a run on another pod, on several, or on what is left of them."""
    from nsa_ops.fleet.resume import execute_fleet_resume, plan_fleet_resume

    if prove:
        message = "`--prove` works for a run that stays on its one pod"
        raise ConfigurationError(message, hint="Leave it out")
    if request.afresh and request.path:
        message = "`--afresh` begins at the first step, but `--from` at a checkpoint"
        raise ConfigurationError(message, hint="Leave out one of them")
    if len(request.pods) == 1:
        refuse_port(request.port)
    planned = plan_fleet_resume(session.operator, request)
    session.agree(planned.plan)
    session.interrupt_note = (
        "repeat it, or finish what has started with `nsa-ops reconcile`; nothing is started twice"
    )
    return execute_fleet_resume(session.operator, planned)
