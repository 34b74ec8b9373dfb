"""From a bare machine to one that may be launched on: provision, then preflight, if need be."""

from collections.abc import Callable

from nsa_ops.configure import load_hardware, require_profile
from nsa_ops.context import Operator
from nsa_ops.plan import Plan
from nsa_ops.preflight.guardrails import PREFLIGHT
from nsa_ops.preflight.preflight import blocking_checks, refusal_of, run_preflight
from nsa_ops.provision.provision import execute_provision, plan_provision
from nsa_ops.quantities import count_of
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.runs.launch import LaunchRequest, check_request


def make_ready(operator: Operator, request: LaunchRequest, agree: Callable[[Plan], None]) -> None:
    """Make a pod ready for a launch; does nothing that was done before.

    Args:
        operator: Who asks.
        request: The launch that is to follow.
        agree: Shows a plan that changes something; it raises unless the operator agrees.

    Raises:
        ConfigurationError: If the launch could not follow, as `check_request` says.
        RefusedError: If the machine cannot become a pod, or its preflight is red.
        OpsError: If a step fails.
    """
    check_request(request)
    planned = plan_provision(operator, request.pod, request.choice.profile)
    if planned.plan.changes:
        agree(planned.plan)
        execute_provision(operator, planned)
    if PREFLIGHT in request.overrides:
        return
    pod = planned.link.record
    hardware = load_hardware(require_profile(operator, request.choice, pod.profile))
    code_id = take_snapshot().code_id
    kept = operator.store.newest_report(pod.pod_id, code_id, hardware.name)
    if kept is not None and not blocking_checks(kept[1].checks):
        return
    found = run_preflight(operator, pod.name, request.choice, request.overrides)
    refusal = refusal_of(found)
    if refusal is not None:
        raise refusal
    operator.tell(
        f"preflight of {pod.name}: {found.verdict}, {count_of(len(found.report.checks), 'check')}"
    )
