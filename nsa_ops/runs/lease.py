"""The lease of a run: one pod has it, and it goes to another only with proof or by an override.

On the pod the runner, the trainer and the watchdog hold locks of the run, and process.json names
who. Here the registry names that pod. A pod that the run left while nobody could ask it stays known
as an open act, `leave pod`, until `reconcile` has asked it. Of the commands typed here, one at a
time starts or moves a run: two that were planned together would otherwise start it twice.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nsa_core.config.base import disk_advice
from nsa_core.rundir.layout import check_run_id
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import ConfigurationError, LocalResourceError, StateConflictError
from nsa_ops.pod.messages import ManifestSummary
from nsa_ops.private import make_private_folder
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.old_pod import OLD_POD, OldPod, allow_taking, look_at_old_pod
from nsa_ops.store import RunRecord, Store

LEAVE_POD = "leave pod"
#: In the state folder: a file for each run, locked by the command that starts or moves it.
LEASES = "leases"


@dataclass(frozen=True)
class Takeover:
    """What it means that a run is to be on another pod than the registry says.

    Attributes:
        run: The run as it was known; None if nothing is taken from anybody.
        old: What its pod shows.
        notes: What the operator should know before saying yes.
    """

    run: RunRecord | None = None
    old: OldPod | None = None
    notes: tuple[str, ...] = ()

    @property
    def left(self) -> str:
        """Pod that it is taken from; empty if it is not."""
        return self.old.pod if self.old else ""


def plan_takeover(
    operator: Operator, run: RunRecord | None, link: PodLink, overrides: Mapping[str, str]
) -> Takeover:
    """Prove that the pod of a run does not run it, where the run is to be on another pod.

    Args:
        operator: Who asks.
        run: The run as it is known; None if it is not.
        link: Pod that it is to be on.
        overrides: Reasons by name; `old-pod` counts where nobody can tell.

    Raises:
        StateConflictError: If it runs there, or nobody can tell and no reason is given.
    """
    if run is None or _is_there(run, link):
        return Takeover()
    old = look_at_old_pod(operator, run)
    notes = allow_taking(old, run.run_id, link.record.name, overrides)
    return Takeover(run, old, tuple(notes))


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


def require_unmoved(operator: Operator, planned: RunRecord) -> None:
    """Refuse a plan for a run that another command has started or moved since; under its lease.

    Raises:
        StateConflictError: If the registry says something else of it than the plan does.
    """
    now = operator.store.find_run(planned.run_id)
    if now == planned:
        return
    where = f"attempt {now.attempt} on pod `{now.pod}`" if now else "not known here any more"
    message = f"Run `{planned.run_id}` is {where} since this was planned: another command did that"
    hint = f"See `nsa-ops status {planned.run_id}`, then repeat it if it is still wanted"
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


def record_takeover(operator: Operator, taken: Takeover, overrides: Mapping[str, str]) -> None:
    """Keep the old pod in mind, where nobody could prove that it does not run the run."""
    if taken.run is not None and taken.old is not None and not taken.old.is_proven:
        note_left(operator, taken.run, taken.old, overrides.get(OLD_POD, ""))


def note_left(operator: Operator, run: RunRecord, old: OldPod, reason: str) -> None:
    """Leave an act open: that pod may come back with a trainer of the run."""
    store = operator.store
    if run.pod in dict(left_pods(store, run.run_id)):
        return
    detail = {"pod": run.pod, "code_id": run.code_id, "reason": reason or old.problem}
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
        f"attempt {run.attempt}, which was last begun from here; halt it before you go on: "
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
