"""The lease of a run: one pod has it, and it goes to another only with proof or by an override.

On the pod the runner, the trainer and the watchdog hold locks of the run, and process.json names
them. Here the registry names that pod. A pod that the run left while nobody could ask it stays
known as an open act, `leave pod`, until `reconcile` has asked it. Of the commands typed here, one
at a time starts or moves a run: two that were planned together would otherwise start it twice.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nsa_core.config.base import disk_advice
from nsa_core.rundir.layout import check_run_id
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.agents import probe_run
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import (
    ConfigurationError,
    DeadlineError,
    LocalResourceError,
    NotFoundError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
)
from nsa_ops.local_files import make_private_folder
from nsa_ops.pod.messages import ManifestSummary, RunReport
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import LIVING
from nsa_ops.runs.wait import ENDED
from nsa_ops.store import RunRecord, Store

LEAVE_POD = "leave pod"
#: In the state folder: a file for each run, locked by the command that starts or moves it.
LEASES = "leases"
#: Name under which `--override` passes what the old pod may still hold.
OLD_POD = "old-pod"
#: How long the watchdog of a run that has ended may take to be gone, and how often it is asked.
LEAVING_S = 20.0
LEAVING_POLL_S = 1.0
_FLAG = f"pass `--override {OLD_POD}=REASON`"
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
    handle = RunHandle(operator.link(pod), run.code_id, run.run_id)
    try:
        return OldPod(run.pod, _read_report(operator, handle), is_gone=False)
    except (PodUnreachableError, DeadlineError) as error:
        return OldPod(run.pod, None, is_gone=True, problem=error.message)
    except OpsError as error:
        is_gone = isinstance(error, NotFoundError)
        asked = OldPod(run.pod, None, is_gone=is_gone, problem=error.message)
    try:
        return _ask_locks(handle, asked)
    except OpsError:
        return asked


def _read_report(operator: Operator, run: RunHandle) -> RunReport:
    """What the pod shows, once the processes of an attempt that has ended are gone."""
    end_s = operator.clock.monotonic_s() + LEAVING_S
    report = probe_run(run)
    while report.state in ENDED and _living(report) and operator.clock.monotonic_s() < end_s:
        operator.clock.sleep(LEAVING_POLL_S)
        report = probe_run(run)
    return report


def _ask_locks(run: RunHandle, asked: OldPod) -> OldPod:
    words = ("sh", "-c", _LOCKS, "sh", str(run.run_dir))
    said = run.link.transport.run(words, timeout_s=QUICK_S).text.strip()
    if said == "held":
        return replace(asked, is_gone=False, is_held=True)
    return replace(asked, is_free=True) if said in {"absent", "free"} else asked


def _living(report: RunReport) -> str:
    """What of the run lives by its pod's account; empty if nothing does."""
    if report.state in LIVING:
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
    """What to know before a run leaves a pod; refuses two trainers of it and lost steps; pure.

    Args:
        old: What the old pod shows.
        run_id: Run.
        backup_step: Step of the backup that it would continue from.
        overrides: Reasons by name; only `old-pod` counts here, and never for a run that runs.
        more_steps: The configuration changes, so that a finished run may continue.

    Raises:
        StateConflictError: If the run runs there, or finished.
        RefusedError: If the pod has newer checkpoints than the backup, or answers and cannot tell.
    """
    _refuse_held(old, run_id)
    if old.is_gone:
        return [
            f"{old.problem}; if it comes back and still trains, halt the run there at once: "
            "otherwise two trainers continue one run"
        ]
    if old.report is None:
        why = f"Pod `{old.pod}` cannot tell whether `{run_id}` still runs there: {old.problem}"
        return _overridden(why, f"Make the pod answer, or {_FLAG}", overrides)
    _refuse_living(old, old.report, run_id)
    if old.report.state == "finished" and not more_steps:
        message = f"Run `{run_id}` finished on pod `{old.pod}`: {old.report.why}"
        raise StateConflictError(message, hint="To train on, set more steps with `--set`")
    newest = max((fact.step for fact in old.report.checkpoints if fact.whole), default=0)
    if newest <= backup_step:
        return [f"pod `{old.pod}` answers; the run is {old.report.state} there"]
    why = (
        f"Pod `{old.pod}` answers and has a checkpoint of step {newest:,}; the newest verified "
        f"backup is step {backup_step:,}"
    )
    fix = f"Pull it with `nsa-ops backup pull {run_id}`, or {_FLAG}"
    return _overridden(why, fix, overrides)


def allow_taking(old: OldPod, run_id: str, pod: str, overrides: Mapping[str, str]) -> list[str]:
    """What to know before a run is on another pod; refuses it while its own may run it; pure.

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
            f"To continue the run, `nsa-ops resume {run_id} --pod {pod}`; where `{old.pod}` is "
            f"gone for good, {_FLAG}"
        )
        raise StateConflictError(why, hint=hint)
    return [f"{why}; overridden: {reason}"]


def _refuse_held(old: OldPod, run_id: str) -> None:
    if old.is_held:
        message = (
            f"A process of run `{run_id}` holds its lock on pod `{old.pod}`, which cannot "
            f"say more: {old.problem}. {_NEVER_TWO}"
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


def _overridden(why: str, fix: str, overrides: Mapping[str, str]) -> list[str]:
    reason = overrides.get(OLD_POD)
    if reason is None:
        raise RefusedError(why, hint=fix)
    return [f"{why}; overridden: {reason}"]


@dataclass(frozen=True)
class Takeover:
    """Whether a run leaves the pod that the registry names.

    Attributes:
        run: The run as it was known; None if it does not matter.
        old: What its pod shows; None if it stays there.
        notes: What the operator should know before saying yes.
        reason: Why it is taken although nobody could prove that it does not run there, in the
            operator's words.
    """

    run: RunRecord | None = None
    old: OldPod | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def left(self) -> str:
        """Pod that it is taken from; empty if it is not."""
        return self.old.pod if self.old else ""


def plan_takeover(
    operator: Operator, run: RunRecord | None, link: PodLink, overrides: Mapping[str, str]
) -> Takeover:
    """Prove that the pod of a run does not run it, where the run is to be on another pod (`link`).

    Raises:
        StateConflictError: If it runs there, or nobody can tell and no reason is given.
    """
    if run is None or _is_there(run, link):
        return Takeover()
    if run.others:
        names = ", ".join(f"`{one.pod}`" for one in run.members)
        message = f"Run `{run.run_id}` is of {len(run.members)} pods: {names}"
        hint = f"Continue it elsewhere: `nsa-ops resume {run.run_id} --pods {link.record.name}`"
        raise StateConflictError(message, hint=hint)
    old = look_at_old_pod(operator, run)
    notes = allow_taking(old, run.run_id, link.record.name, overrides)
    return Takeover(run, old, tuple(notes), overrides.get(OLD_POD, ""))


@contextmanager
def lease_held(operator: Operator, run_id: str) -> Iterator[None]:
    """Let no other command start or move a run from here while the block lasts.

    The file stays: one that is removed while somebody waits for it could be locked twice.

    Raises:
        StateConflictError: If another command does.
        LocalResourceError: If the lock cannot be made.
    """
    try:
        path = operator.store.path.parent / LEASES / f"{check_run_id(run_id)}.lock"
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    try:
        make_private_folder(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        message = f"The lock `{path}` of a run cannot be made: {error.strerror}"
        raise LocalResourceError(message, hint=disk_advice(error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        message = f"Another command is starting or moving run `{run_id}`"
        raise StateConflictError(message, hint="Wait for it, then repeat this one") from error
    try:
        yield
    finally:
        os.close(descriptor)


def require_unmoved(operator: Operator, planned: Takeover) -> Takeover:
    """Refuse a plan for a run that another command has started or moved since; under its lease."""
    run = planned.run
    if run is None or (now := operator.store.find_run(run.run_id)) == run:
        return planned
    where = f"attempt {now.attempt} on pod `{now.pod}`" if now else "not known here any more"
    message = f"Run `{run.run_id}` is {where} since this was planned: another command did that"
    hint = f"See `nsa-ops status {run.run_id}`, then repeat it if it is still wanted"
    raise StateConflictError(message, hint=hint)


def _is_there(run: RunRecord, link: PodLink) -> bool:
    """Whether the registry means this very machine, or its run directory is on it."""
    pod = link.record
    if run.pod != pod.name:
        return False
    if run.pod_id in {"", pod.pod_id}:
        return True
    run_dir = str(link.run_dir(run.run_id))
    return link.transport.run(("test", "-e", run_dir), timeout_s=QUICK_S).exit_code == 0


def record_takeover(operator: Operator, taken: Takeover) -> None:
    """Leave an act open where nobody could prove that the old pod does not run the run."""
    run, old, store = taken.run, taken.old, operator.store
    if run is None or old is None or old.is_proven or run.pod in dict(left_pods(store, run.run_id)):
        return
    detail = {"pod": run.pod, "code_id": run.code_id, "reason": taken.reason or old.problem}
    number = store.leave_open(LEAVE_POD, run.run_id, **detail)
    if store.find_pod(run.pod) is None:
        store.end_intent(number, "the pod is not known here, so nobody can ask it")


def last_reason(store: Store, run_id: str) -> str:
    """Why the run was last taken from a pod that nobody could ask; empty if it never was."""
    reasons = [str(one.details.get("reason", "")) for one in store.intents(LEAVE_POD, run_id)]
    return reasons[-1] if reasons else ""


def left_pods(store: Store, run_id: str) -> list[tuple[str, str]]:
    """Pods that a run left unproven and that nobody has asked since, each with the reason given."""
    found = [one for one in store.open_intents() if (one.act, one.subject) == (LEAVE_POD, run_id)]
    details = [one.details for one in found]
    return [(str(one.get("pod", "")), str(one.get("reason", ""))) for one in details]


def unsettled_notes(store: Store, run_id: str) -> list[str]:
    """How to look at a run on each pod that it left unproven, and how to stop it there."""
    return [
        f"`{run_id}` left pod `{pod}` ({reason}), and nobody has asked it since: see "
        f"`nsa-ops status {run_id} --pod {pod}`, stop it with `nsa-ops halt {run_id} --pod {pod}`"
        for pod, reason in left_pods(store, run_id)
    ]


def other_lineage_notes(run: RunRecord, shown: ManifestSummary) -> list[str]:
    """Whether a pod shows another lineage of a run than the one that was last begun from here."""
    is_same = shown.attempt_id in {"", run.attempt_id} or run.attempt_id == ""
    if shown.attempt > run.attempt or (shown.attempt == run.attempt and is_same):
        return []
    return [
        f"pod `{run.pod}` shows attempt {shown.attempt} of another lineage of `{run.run_id}` than "
        f"attempt {run.attempt}, which was last begun from here; halt it before you continue: "
        f"`nsa-ops halt {run.run_id} --pod {run.pod}`"
    ]


def holding(run: RunRecord, link: PodLink, manifest: RunManifest | ManifestSummary) -> RunRecord:
    """The run's record with the pod and the attempt that hold it now."""
    return replace(
        run,
        pod=link.record.name,
        pod_id=link.record.pod_id,
        profile=manifest.profile,
        code_id=manifest.code_id,
        attempt=manifest.attempt,
        attempt_id=manifest.attempt_id,
    )
