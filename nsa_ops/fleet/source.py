"""What the next attempt continues, on other pods or several: pod 0's checkpoint, or the backup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nsa_core.rundir.lineage import find_divergence, lineage_of
from nsa_core.rundir.manifest import AFRESH, AUTO, RunManifest
from nsa_ops.agents import find_run_manifest, probe_run, read_run_manifest
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.restore import RestorePlan, plan_restore
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import ConfigurationError, StateConflictError
from nsa_ops.fleet.move import choose_code, newest_backup
from nsa_ops.remote.snapshot import has_code
from nsa_ops.runs.adopt import read_backed_up
from nsa_ops.runs.checkpoints import refuse_foreign
from nsa_ops.runs.choose import LIVING, FoundRun, handle_of
from nsa_ops.runs.resume import choose_checkpoint, require_ended
from nsa_ops.runs.windows import TRAINER_MODULE, list_windows
from nsa_ops.store import RunRecord

_MOVE_AWAY = "Move it away there, then repeat this"


@dataclass(frozen=True)
class FleetResumeRequest:
    """What the operator asked for.

    Attributes:
        pods: Pods to continue on; empty for those that it has.
        port: Where the ranks meet on pod 0; None for where they met before.
        path: Folder of a checkpoint on pod 0; empty for the newest whole one.
    """

    run_id: str | None
    pods: tuple[str, ...] = ()
    port: int | None = None
    path: str = ""
    afresh: bool = False
    sets: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    trainer_module: str = ""


@dataclass(frozen=True)
class Source:
    """Where the next attempt continues.

    Attributes:
        old: Manifest of the attempt that ended, or of the one that was begun and never started.
        trained: Manifest of the attempt that ended; None where `old` is it.
        free_bytes: Free on pod 0 where its checkpoints go; None if unknown, or if it is left.
        step: Step of the checkpoint; 0 without one.
        checkpoint: Its folder; empty without one.
        damaged: Newer checkpoints that are passed over, each in one line.
        has_finished: The attempt that ended trained all its steps, as far as pod 0 can be asked.
        is_unstarted: The attempt of `old` was begun and never started, as after a cut.
        backup: Where the copy for a new pod 0 comes from; None if pod 0 stays.
        copy_on: Pod that has a restored copy already, as after a cut; empty without one.
        restore: What to copy to the new pod 0; None if nothing is.
        aside: Pods whose share of an earlier attempt is renamed first.
    """

    old: RunManifest
    step: int = 0
    checkpoint: str = ""
    damaged: tuple[str, ...] = ()
    resume: str = AUTO
    module: str = TRAINER_MODULE
    has_finished: bool = False
    is_unstarted: bool = False
    backup: BackupFolder | None = None
    copy_on: str = ""
    restore: RestorePlan | None = None
    aside: tuple[RunHandle, ...] = ()
    trained: RunManifest | None = None
    free_bytes: int | None = None


def find_on_pod(record: RunRecord, link: PodLink, wanted: FleetResumeRequest) -> Source:
    """What pod 0 has, its checkpoint hashed.

    Raises:
        StateConflictError: If the run runs there, or finished.
        NotFoundError, VerificationError: As `plan_resume`.
    """
    found = FoundRun(record, link, probe_run(handle_of(link, record)))
    require_ended(found, changes_something=bool(wanted.sets or wanted.path or wanted.afresh))
    old = read_run_manifest(link, record.run_id)
    processes = found.report.processes
    module = wanted.trainer_module or (processes.module if processes else TRAINER_MODULE)
    checkpoint, damaged = (None, []) if wanted.afresh else choose_checkpoint(found, wanted.path)
    if checkpoint is not None:
        refuse_foreign(checkpoint, old)
    start_at = checkpoint.path if wanted.path and checkpoint else AUTO
    return Source(
        old=old,
        step=checkpoint.step if checkpoint else 0,
        checkpoint=checkpoint.path if checkpoint else "",
        damaged=tuple(damaged),
        resume=AFRESH if wanted.afresh else start_at,
        module=module,
        has_finished=found.report.state == "finished",
        is_unstarted=found.report.state == "planned" and not (wanted.path or wanted.afresh),
        free_bytes=found.report.disk_free_bytes,
    )


def find_in_backup(
    operator: Operator, record: RunRecord, links: Sequence[PodLink], wanted: FleetResumeRequest
) -> Source:
    """What the newest verified backup has, and what the pods have of the run already.

    Raises:
        NotFoundError: If nothing of the run is backed up.
        ConfigurationError: If another start is asked for than the newest backup.
        StateConflictError: If a pod has a run directory of another time under that id.
    """
    if wanted.path or wanted.afresh:
        has = f"Pod `{record.pod}`, which has the checkpoints of `{record.run_id}`,"
        message = f"{has} is left out, so it begins at the newest backup"
        raise ConfigurationError(
            message, hint=f"Leave out `--from` and `--afresh`, or keep `{record.pod}`"
        )
    folder = newest_backup(operator, record.run_id)
    old = read_backed_up(folder)
    aside, copy_on, begun = [], "", None
    for link in links:
        run = RunHandle(link, record.code_id, record.run_id)
        list_windows(run)  # refused here if a run of this id in another directory has it
        there = find_run_manifest(link, record.run_id)
        if there is None:
            continue
        if there.node.rank > 0:
            aside.append(run)
            continue
        is_begun = there.pod_id == link.record.pod_id
        is_copy = not copy_on and _is_copy(there, old)
        if is_begun or not is_copy:
            _require_unstarted(replace(run, code_id=there.code_id), is_copy=is_copy)
        copy_on, begun = run.pod, there if is_begun else None
    return Source(
        old=begun or old,
        module=wanted.trainer_module or TRAINER_MODULE,
        is_unstarted=begun is not None,
        backup=folder,
        copy_on=copy_on,
        aside=tuple(aside),
        trained=old if begun else None,
    )


def _is_copy(there: RunManifest, old: RunManifest) -> bool:
    """Whether a pod has what a restore makes, or the attempt that was begun after it."""
    return find_divergence(lineage_of(old), lineage_of(there)) is None


def _require_unstarted(run: RunHandle, *, is_copy: bool) -> None:
    """Refuse a run directory that nobody restored, but for an attempt that only has to start."""
    report = probe_run(run) if _has_agent(run) else None
    if report is not None and report.state in LIVING:
        message = f"Run `{run.run_id}` is {report.state} on pod `{run.pod}`: {report.why}"
        hint = "Let the registry know of it with `nsa-ops reconcile`"
        raise StateConflictError(message, hint=hint)
    if not is_copy or report is None or report.state != "planned":
        message = f"`{run.run_dir}` is from an earlier time of `{run.run_id}` on pod `{run.pod}`"
        raise StateConflictError(message, hint=_MOVE_AWAY)


def _has_agent(run: RunHandle) -> bool:
    """Whether the pod has the code that looks at the run there."""
    link = run.link
    return has_code(link.transport, link.record.python, link.code(run.code_id))


def with_restore(operator: Operator, source: Source, link: PodLink) -> Source:
    """The same with what is copied to the new pod 0, every byte of it verified.

    A copy that is there already is taken as it is.

    Raises:
        StateConflictError: If the pod has a directory of the run that is no copy, or a copy that
            has less than the backup.
    """
    if source.backup is None:
        return source
    receipts = operator.store.receipts()
    is_shared = any(run.pod == link.record.name for run in source.aside)
    try:
        planned = plan_restore(
            source.backup, link.runs, link=link, receipts=receipts, newest_only=True,
            may_exist=is_shared or bool(source.copy_on),
        )  # fmt: skip
    except StateConflictError as error:
        raise StateConflictError(error.message, hint=_MOVE_AWAY) from error
    step = _step_of_copy(source, link, planned.step) if source.copy_on else planned.step
    folder = str(link.run_dir(planned.run_id) / "checkpoints" / f"step_{step:06d}")
    restore = None if source.copy_on else planned
    return replace(source, step=step, checkpoint=folder, restore=restore)


def _step_of_copy(source: Source, link: PodLink, backup_step: int) -> int:
    """Step of the newest whole checkpoint that a pod has of the run.

    Raises:
        StateConflictError: If that is not as far as the backup, or nothing there can tell.
    """
    code = choose_code(link, source.old)  # None where the pod has the run's own
    run = RunHandle(link, code.code_id if code else source.old.code_id, source.old.run_id)
    has_agent = code is None or _has_agent(run)
    facts = probe_run(run).checkpoints if has_agent else []
    step = max((one.step for one in facts if one.whole), default=0)
    if step >= backup_step:
        return step
    has = f"shows step {step}" if has_agent else "has no code to look at it"
    message = f"Pod `{run.pod}` has `{run.run_dir}` and {has}; the backup is at step {backup_step}"
    raise StateConflictError(message, hint=_MOVE_AWAY)
