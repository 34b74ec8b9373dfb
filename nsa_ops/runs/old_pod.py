"""The pod that a run is about to leave: what it shows, and whether the run may go on elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nsa_ops.agents import probe_run
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import (
    DeadlineError,
    NotFoundError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
)
from nsa_ops.pod.messages import RunReport
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import LIVE
from nsa_ops.runs.wait import ENDED
from nsa_ops.store import RunRecord

#: Name under which `--override` passes what the old pod may still hold.
OLD_POD = "old-pod"
#: How long the watchdog of a run that has ended may take to be gone, and how often it is asked.
LEAVING_S = 20.0
POLL_S = 1.0
_NEVER_TWO = "Two trainers of one run are never allowed"
#: The locks end with the processes that hold them, however those end.
_LOCKS = """
[ -d "$1" ] || { echo absent; exit 0; }
command -v flock >/dev/null || { echo unknown; exit 0; }
for lock in runner.lock watchdog.lock; do
  [ -e "$1/$lock" ] || continue
  flock -n "$1/$lock" true || { echo held; exit 0; }
done
echo free
"""


@dataclass(frozen=True)
class OldPod:
    """What the pod of a run shows before the run leaves it.

    Attributes:
        pod: Its name.
        report: What it shows of the run; None if it shows nothing.
        is_gone: Nobody answers there, or the run is not there any more.
        problem: Why there is no report, in one line.
        is_held: A runner, trainer or watchdog of the run holds its lock there.
        is_free: The pod answers, and the run is not there, or nobody holds a lock of it.
    """

    pod: str
    report: RunReport | None
    is_gone: bool
    problem: str = ""
    is_held: bool = False
    is_free: bool = False

    @property
    def is_proven(self) -> bool:
        """The pod itself says that nothing of the run lives there."""
        return self.is_free or (self.report is not None and not _living(self.report))


def look_at_old_pod(operator: Operator, run: RunRecord) -> OldPod:
    """Ask the pod that the registry names for the run; a pod that does not answer is gone.

    Where its agent cannot tell, the locks of the run are asked: they need no Python.
    """
    pod = operator.store.find_pod(run.pod)
    if pod is None:
        return OldPod(run.pod, None, is_gone=True, problem=f"Pod `{run.pod}` was forgotten")
    if run.pod_id not in {"", pod.pod_id}:
        problem = f"Pod `{run.pod}` is another machine than the one that the run was on"
        return OldPod(run.pod, None, is_gone=True, problem=problem)
    link = operator.link(pod)
    try:
        return OldPod(run.pod, _read_report(operator, link, run), is_gone=False)
    except (PodUnreachableError, DeadlineError) as error:
        return OldPod(run.pod, None, is_gone=True, problem=error.message)
    except OpsError as error:
        is_gone = isinstance(error, NotFoundError)
        asked = OldPod(run.pod, None, is_gone=is_gone, problem=error.message)
    try:
        return _ask_locks(link, run, asked)
    except OpsError:
        return asked


def _read_report(operator: Operator, link: PodLink, run: RunRecord) -> RunReport:
    """What the pod shows, once the processes of an attempt that has ended are gone."""
    end_s = operator.clock.monotonic_s() + LEAVING_S
    report = probe_run(link, run.code_id, run.run_id)
    while report.state in ENDED and _living(report) and operator.clock.monotonic_s() < end_s:
        operator.clock.sleep(POLL_S)
        report = probe_run(link, run.code_id, run.run_id)
    return report


def _ask_locks(link: PodLink, run: RunRecord, asked: OldPod) -> OldPod:
    words = ("sh", "-c", _LOCKS, "sh", str(link.run_dir(run.run_id)))
    said = link.transport.run(words, timeout_s=QUICK_S).text.strip()
    if said == "held":
        return replace(asked, is_gone=False, is_held=True)
    return replace(asked, is_free=True) if said in {"absent", "free"} else asked


def _living(report: RunReport) -> str:
    """What of the run lives by its pod's account; empty if nothing does."""
    if report.state in LIVE - {"planned"}:
        return f"is {report.state}"
    lives = {
        "trainer": report.trainer_alive,
        "runner": report.runner_alive,
        "watchdog": report.watchdog_alive,
    }
    names = " and ".join(name for name, is_alive in lives.items() if is_alive)
    return f"is {report.state}, and its {names} still lives" if names else ""


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
    _refuse_held(old, run_id)
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


def allow_taking(old: OldPod, run_id: str, pod: str, overrides: Mapping[str, str]) -> list[str]:
    """Refuse to let a run be on another pod while its own may run it; pure.

    Args:
        old: What its own pod shows.
        run_id: Run.
        pod: Pod that it is to be on.
        overrides: Reasons by name; only `old-pod` counts, and never for a run that runs.

    Returns:
        What the operator should know before saying yes.

    Raises:
        StateConflictError: If it runs there, or nobody can tell and no reason is given.
    """
    _refuse_held(old, run_id)
    if old.report is not None:
        _refuse_living(old, old.report, run_id)
        return [f"`{run_id}` is {old.report.state} on pod `{old.pod}`, and goes to `{pod}`"]
    if old.is_free:
        return [f"nothing of `{run_id}` lives on pod `{old.pod}`, and it goes to `{pod}`"]
    why = f"Nobody can tell whether `{run_id}` runs on pod `{old.pod}`: {old.problem}"
    reason = overrides.get(OLD_POD)
    if reason is None:
        hint = (
            f"To go on with the run, `nsa-ops resume {run_id} --pod {pod}`; where `{old.pod}` is "
            f"gone for good, {_flag()}"
        )
        raise StateConflictError(why, hint=hint)
    return [f"{why}; overridden: {reason}"]


def _refuse_held(old: OldPod, run_id: str) -> None:
    if old.is_held:
        message = (
            f"A process of run `{run_id}` holds its lock on pod `{old.pod}`, which cannot say "
            f"more: {old.problem}. {_NEVER_TWO}"
        )
        raise StateConflictError(message, hint=f"Look with `nsa-ops pod ssh {old.pod}`")


def _refuse_living(old: OldPod, report: RunReport, run_id: str) -> None:
    living = _living(report)
    if living:
        message = (
            f"Run `{run_id}` {living} on pod `{old.pod}`, which answers: {report.why}. {_NEVER_TWO}"
        )
        hint = f"Stop it with `nsa-ops halt {run_id}`, then `nsa-ops backup pull {run_id}`"
        raise StateConflictError(message, hint=hint)


def _refuse_unless_ended(old: OldPod, report: RunReport, run_id: str, *, more_steps: bool) -> None:
    _refuse_living(old, report, run_id)
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
