"""Adopt: let this laptop know a run that another one launched, or that was restored to a pod."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nsa_core.rundir.layout import RUN_ID
from nsa_core.rundir.lineage import lineage_of
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_ops.agents import probe_run
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.restore import RestorePlan
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import (
    ConfigurationError,
    NotFoundError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pods.known import meant_pod
from nsa_ops.provision.receipt import RECEIPT_NAME, parse_receipt
from nsa_ops.remote.snapshot import has_code, ship, take_snapshot
from nsa_ops.remote.transport import MAX_ANSWER_BYTES, QUICK_S
from nsa_ops.runs.choose import handle_of, read_named_manifest, record_of
from nsa_ops.runs.lease import (
    OLD_POD,
    Takeover,
    lease_held,
    plan_takeover,
    record_takeover,
)
from nsa_ops.store import PodRecord, RunRecord

#: Prints a name a line of the run directories that have a manifest.
_LIST = """
cd -- "$1" 2>/dev/null || exit 0
for name in *; do [ -f "$name/manifest.json" ] && printf '%s\\n' "$name"; done; true
"""
_SHOWN = 5


@dataclass(frozen=True)
class AdoptionPlan:
    """A run that this laptop may know from now on.

    Attributes:
        record: What the registry will say of it.
        known: What it says now; None if it does not know the run.
        pod: Its pod, with the interpreter that runs there use.
    """

    record: RunRecord
    known: RunRecord | None
    pod: PodRecord
    plan: Plan


@dataclass(frozen=True)
class Adopted:
    """A run that this laptop knows now."""

    run_id: str
    pod: str
    attempt: int
    state: str
    why: str
    python: str


def plan_adopt_run(operator: Operator, run_id: str | None, pod: str | None) -> AdoptionPlan:
    """What adopting a run means; looks at the pod and changes nothing.

    Args:
        operator: Who asks.
        run_id: Run; None for the only one on the pod that is not known here.
        pod: Pod; None where only one fits.

    Raises:
        NotFoundError: If the pod has no such run, or none that is new.
        ConfigurationError: If several fit.
        StateConflictError: If a run of that id is known here on another pod or of another lineage.
        VerificationError: If its manifest cannot be used.
    """
    store = operator.store
    link = operator.link(meant_pod(operator, pod))
    manifest = read_named_manifest(link, run_id or _only_new(operator, link))
    _refuse_share(link, manifest)
    record, known = record_of(link, manifest), store.find_run(manifest.run_id)
    if known is not None:
        _refuse_another(known, record, manifest)
        record = record.with_others(known.others)
    python = _interpreter(link)
    where = f"attempt {record.attempt}, profile {record.profile}, code {record.code_id}"
    ask = f"ask pod `{record.pod}` through `{python}`, with which it was provisioned"
    is_known = python == link.record.python
    steps = [
        *([] if is_known else [Step("use interpreter", ask)]),
        Step("register", f"remember `{record.run_id}`: {where}", is_done=known == record),
    ]
    notes = _notes(record, manifest)
    plan = plan_of(f"Adopt run `{record.run_id}` on pod `{record.pod}`", steps, notes)
    return AdoptionPlan(record, known, replace(link.record, python=python), plan)


def _refuse_share(link: PodLink, manifest: RunManifest) -> None:
    """Of a run on several pods the registry names pod 0."""
    if manifest.node.rank > 0:
        pod, rank = link.record.name, manifest.node.rank
        message = f"Pod `{pod}` is pod {rank} of run `{manifest.run_id}`; pod 0 has its checkpoints"
        hint = f"Adopt it from pod 0, which has the address {manifest.node.address}"
        raise StateConflictError(message, hint=hint)


def _notes(record: RunRecord, manifest: RunManifest) -> list[str]:
    num_pods = manifest.config.runtime.num_pods
    if num_pods == len(record.members):
        return []
    return [
        f"it trains on {num_pods} pods, and this laptop learns of pod 0 alone: `status` shows its "
        f"part, `halt` stops all; to resume it, name them: `nsa-ops resume {record.run_id} --pods "
        f"{record.pod},OTHERS`"
    ]


def _only_new(operator: Operator, link: PodLink) -> str:
    """The run of a pod that is not known here."""
    argv = ("sh", "-c", _LIST, "sh", str(link.runs))
    done = link.transport.run(argv, timeout_s=QUICK_S, max_bytes=MAX_ANSWER_BYTES)
    there = [name for name in done.text.splitlines() if RUN_ID.fullmatch(name)]
    new = [name for name in there if operator.store.find_run(name) is None]
    pod = link.record.name
    if not new:
        known = "; those there are known already" if there else ""
        message = f"Pod `{pod}` has no run to adopt below `{link.runs}`{known}"
        raise NotFoundError(
            message, hint="See `nsa-ops run ls`, and `nsa-ops pod show` for its root"
        )
    if len(new) > 1:
        names = ", ".join(f"`{name}`" for name in new[-_SHOWN:])
        message = f"Which run? Pod `{pod}` has {len(new)} that are not known here, such as {names}"
        raise ConfigurationError(message, hint=f"Name one: `nsa-ops run adopt RUN --pod {pod}`")
    return new[0]


def _refuse_another(known: RunRecord, record: RunRecord, manifest: RunManifest) -> None:
    """A run id is a name: the same one on another pod, or of other attempts, is another run."""
    look = f"Look at it with `nsa-ops status {record.run_id} --pod {record.pod}`"
    if known.pod != record.pod:
        message = f"Run `{known.run_id}` is known here on pod `{known.pod}`, not on `{record.pod}`"
        raise StateConflictError(message, hint=f"{look}; halt it on one of the two")
    ids = lineage_of(manifest).ids
    if known.attempt_id and ids.get(known.attempt) != known.attempt_id:
        message = (
            f"Pod `{record.pod}` shows another lineage of `{record.run_id}` than the one that is "
            f"known here, up to attempt {known.attempt}"
        )
        raise StateConflictError(message, hint=f"{look}, and see `nsa-ops backup ls`")


def _interpreter(link: PodLink) -> str:
    """The interpreter of runs that the pod's receipt names, else the one that is known here."""
    path = f"{link.root}/{RECEIPT_NAME}"
    try:
        content = link.transport.tail(path, 0, max_bytes=MAX_ANSWER_BYTES, timeout_s=QUICK_S)
    except NotFoundError:
        return link.record.python
    receipt = parse_receipt(content.decode(errors="replace"))
    if receipt is None:
        return link.record.python
    if not (receipt.python.startswith("/") and receipt.python.isprintable()):
        message = f"`{path}` on pod `{link.record.name}` names no interpreter: {receipt.python!r}"
        raise VerificationError(message, hint="Repeat `nsa-ops provision`")
    return receipt.python


def execute_adopt_run(operator: Operator, planned: AdoptionPlan) -> Adopted:
    """Ask the run's own agent once, then remember the run and how its pod is asked."""
    record, pod = planned.record, planned.pod
    with lease_held(operator, record.run_id):
        if operator.store.find_run(record.run_id) != planned.known:
            message = f"Run `{record.run_id}` became known here since this was planned"
            raise StateConflictError(message, hint="Repeat it if it is still wanted")
        report = probe_run(handle_of(operator.link(pod), record))
        if planned.plan.changes:
            with operator.store.intent("run adopt", record.run_id, pod=pod.name):
                if operator.store.find_pod(pod.name) != pod:
                    operator.store.replace_pod(pod)
                operator.store.save_run(record)
    return Adopted(
        record.run_id, pod.name, report.manifest.attempt, report.state, report.why, pod.python
    )


def plan_adoption(
    operator: Operator, link: PodLink, folder: BackupFolder, overrides: Mapping[str, str]
) -> Takeover:
    """Prove that the pod that a backup came from does not run the run, before it is restored.

    Raises:
        StateConflictError: If it runs there, or nobody can tell and no reason is given.
        VerificationError: If the backup has no manifest that can be used.
    """
    manifest = read_backed_up(folder)
    known = operator.store.find_run(manifest.run_id) or _origin_of(operator, link, manifest)
    return plan_takeover(operator, known, link, overrides)


def read_backed_up(folder: BackupFolder) -> RunManifest:
    """The manifest of a backed-up run."""
    try:
        return read_manifest(folder.run)
    except ManifestError as error:
        message = f"The backup `{folder.root}` cannot be used: {error}"
        raise VerificationError(message, hint="Pull it again") from error


def _origin_of(operator: Operator, link: PodLink, manifest: RunManifest) -> RunRecord | None:
    """The run as it would be known here, had it been launched from here; None if on this pod."""
    if manifest.pod_id in {"", link.record.pod_id}:
        return None
    named = {pod.pod_id: pod.name for pod in operator.store.pods()}
    pod = named.get(manifest.pod_id, manifest.pod_id)
    return replace(record_of(link, manifest), pod=pod, pod_id="", attempt=0, attempt_id="")


def adopt_restored(
    operator: Operator, link: PodLink, planned: RestorePlan, overrides: Mapping[str, str]
) -> None:
    """Let the registry name the pod that a run was restored to, and ship its code if it is ours.

    Raises:
        StateConflictError: If the run was started on its old pod meanwhile, or another command is
            starting or moving it.
    """
    folder = BackupFolder(planned.source)
    manifest = read_manifest(folder.run)
    with lease_held(operator, manifest.run_id):
        taken = plan_adoption(operator, link, folder, overrides)
        before = operator.store.find_run(manifest.run_id)
        reason = overrides.get(OLD_POD, "")
        detail = {"pod": link.record.name, "moved_from": taken.left, "override": reason}
        with operator.store.intent("backup adopt", manifest.run_id, **detail):
            record_takeover(operator, taken)
            operator.store.save_run(record_of(link, manifest))
            _ship_code(operator, link, manifest)
    if before is not None and before.pod != link.record.name:
        operator.tell(
            f"`{manifest.run_id}` is looked for on pod `{link.record.name}` from now on, "
            f"and not on `{before.pod}`"
        )


def _ship_code(operator: Operator, link: PodLink, manifest: RunManifest) -> None:
    target = link.code(manifest.code_id)
    if has_code(link.transport, link.record.python, target):
        return
    snapshot = take_snapshot()
    if snapshot.code_id == manifest.code_id:
        ship(snapshot, link.transport, link.record.python, target)
        return
    operator.tell(
        f"pod `{link.record.name}` does not have the code `{manifest.code_id}` of this run: check "
        f"out commit {manifest.code_commit} here and restore or launch from there to ship it"
    )
