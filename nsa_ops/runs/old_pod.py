"""The pod that a run is about to leave: what it shows, and whether the run may go on elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass

from nsa_ops.errors import (
    DeadlineError,
    NotFoundError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
)
from nsa_ops.pod.messages import RunReport
from nsa_ops.runs.agents import probe_run
from nsa_ops.runs.choose import LIVE
from nsa_ops.runs.context import Operator
from nsa_ops.store import RunRecord

#: Name under which `--override` passes what the old pod may still hold.
OLD_POD = "old-pod"


@dataclass(frozen=True)
class OldPod:
    """What the pod of a run shows before the run leaves it.

    Attributes:
        pod: Its name.
        report: What it shows of the run; None if it shows nothing.
        is_gone: Nobody answers there, or the run is not there any more.
        problem: Why there is no report, in one line.
    """

    pod: str
    report: RunReport | None
    is_gone: bool
    problem: str = ""


def look_at_old_pod(operator: Operator, run: RunRecord) -> OldPod:
    """Ask the pod that the registry names for the run; a pod that does not answer is gone."""
    pod = operator.store.find_pod(run.pod)
    if pod is None:
        return OldPod(run.pod, None, is_gone=True, problem=f"Pod `{run.pod}` was forgotten")
    try:
        report = probe_run(operator.link(pod), run.code_id, run.run_id)
    except (PodUnreachableError, DeadlineError, NotFoundError) as error:
        return OldPod(run.pod, None, is_gone=True, problem=error.message)
    except OpsError as error:
        return OldPod(run.pod, None, is_gone=False, problem=error.message)
    return OldPod(run.pod, report, is_gone=False)


def allow_leaving(
    old: OldPod, run_id: str, backup_step: int, overrides: Mapping[str, str], *, more_steps: bool
) -> list[str]:
    """Refuse what would make two trainers of one run or lose steps for nothing; pure.

    Args:
        old: What the old pod shows.
        run_id: Run.
        backup_step: Step of the backup that it would go on from.
        overrides: Reasons by name; only `old-pod` counts here, and never for a run that runs.
        more_steps: The configuration changes, so that a finished run may go on.

    Returns:
        What the operator should know before saying yes.

    Raises:
        StateConflictError: If the run runs there, or finished.
        RefusedError: If the pod has newer checkpoints than the backup, or answers and cannot tell.
    """
    if old.is_gone:
        return [
            f"{old.problem}; if it comes back and still trains, halt the run there at once: two "
            "trainers of one run would both be right"
        ]
    if old.report is None:
        why = f"Pod `{old.pod}` cannot tell whether `{run_id}` still runs there: {old.problem}"
        return _overridden(why, f"Make it answer, or {_flag()}", overrides)
    _refuse_unless_ended(old, old.report, run_id, more_steps=more_steps)
    newest = max((fact.step for fact in old.report.checkpoints if fact.whole), default=0)
    if newest <= backup_step:
        return [f"pod `{old.pod}` answers; the run is {old.report.state} there"]
    why = (
        f"Pod `{old.pod}` answers and has a checkpoint of step {newest:,}; the newest verified "
        f"backup is step {backup_step:,}"
    )
    fix = f"Bring it with `nsa-ops backup pull {run_id}`, or {_flag()}"
    return _overridden(why, fix, overrides)


def _refuse_unless_ended(old: OldPod, report: RunReport, run_id: str, *, more_steps: bool) -> None:
    if report.state in LIVE - {"planned"}:
        message = (
            f"Run `{run_id}` is {report.state} on pod `{old.pod}`, which answers: {report.why}. "
            "Two trainers of one run are never allowed"
        )
        hint = f"Stop it with `nsa-ops halt {run_id}`, then `nsa-ops backup pull {run_id}`"
        raise StateConflictError(message, hint=hint)
    if report.state == "finished" and not more_steps:
        message = f"Run `{run_id}` finished on pod `{old.pod}`: {report.why}"
        raise StateConflictError(message, hint="To train on, set more steps with `--set`")


def _flag() -> str:
    return f"say `--override {OLD_POD}=REASON`"


def _overridden(why: str, fix: str, overrides: Mapping[str, str]) -> list[str]:
    reason = overrides.get(OLD_POD)
    if reason is None:
        raise RefusedError(why, hint=fix)
    return [f"{why}; overridden: {reason}"]
