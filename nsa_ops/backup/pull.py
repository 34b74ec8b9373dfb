"""Pull a run from its pod: small files, then checkpoints, each whole before it counts."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.checkpoint import CheckpointFile, inspect_file, list_checkpoints, plan_removal
from nsa_core.rundir.events import read_beginnings
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.lineage import Lineage, lineage_of
from nsa_core.rundir.names import path_fault, show_name
from nsa_ops.backup.disk import (
    check_space,
    choose_too_large,
    describe_need,
    read_free_bytes,
    read_free_bytes_there,
)
from nsa_ops.backup.folder import (
    BackupFolder,
    BackupRecord,
    read_backup_record,
    write_backup_record,
)
from nsa_ops.backup.receipts import (
    AtMostLost,
    at_most_lost,
    median_step_s,
    newest_held,
    receipts_of,
    steps_ahead,
    still_ahead,
)
from nsa_ops.backup.retention import RetentionPolicy
from nsa_ops.backup.survey import (
    RemoteCheckpoint,
    Survey,
    check_lineage,
    choose_checkpoints,
    read_manifest_there,
    read_survey,
    split_foreign,
)
from nsa_ops.backup.transfer import Problem, Pulled, Transfer
from nsa_ops.backup.verification import HeldCheckpoint, find_held
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import (
    DeadlineError,
    LocalResourceError,
    OpsError,
    PartialError,
    PodUnreachableError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.quantities import count_of, format_bytes
from nsa_ops.remote.files import bytes_here
from nsa_ops.remote.inbound import Refusal, RemoteFile
from nsa_ops.store import Receipt

FreeBytes = Callable[[Path], int]
_ROOM = "Free space, or name a folder on another disk; everything else was brought"
#: Refusals that a plan shows one by one.
_MAX_NOTES = 20


@dataclass(frozen=True)
class PullPlan:
    """What one pull will bring.

    Attributes:
        source: The run's directory on the pod.
        files: Small files that differ or are new.
        unchanged: Small files that are here already.
        checkpoints: Wanted checkpoints that are not here whole.
        present: Wanted checkpoints that are here, hashed again just now.
        refused: Names and files of the pod that are not accepted.
        is_listed: The pod gave a list of its files, so what it does not name has been removed.
        pending_bytes: Bytes that are still to come.
        lineage: Attempts of the run on the pod; None if it has no manifest.
    """

    run_id: str
    source: PurePosixPath
    folder: BackupFolder
    files: list[RemoteFile]
    unchanged: list[RemoteFile]
    checkpoints: list[RemoteCheckpoint]
    present: list[HeldCheckpoint]
    refused: list[Refusal]
    is_listed: bool
    pending_bytes: int
    lineage: Lineage | None
    plan: Plan


def plan_pull(
    link: PodLink,
    run_id: str,
    folder: BackupFolder,
    which: str,
    *,
    newer_than: int | None = None,
    policy: RetentionPolicy | None = None,
) -> PullPlan:
    """Compare the pod's run directory with the backup; changes nothing.

    Args:
        link: The pod.
        run_id: Run.
        folder: The backup, which need not exist.
        which: `latest`, `all`, `none` or a step.
        newer_than: Also bring every checkpoint after this step.
        policy: Which checkpoints the backup keeps; one it would remove at once is not brought.

    Raises:
        NotFoundError: If run or checkpoint do not exist.
        StateConflictError: If the run on the pod is of another lineage than the backup.
        VerificationError: If the pod's manifest cannot be used.
    """
    source = link.run_dir(run_id)
    survey = read_survey(link.transport, source)
    # After the survey: the manifest is then at least as new as every checkpoint in it.
    manifest = read_manifest_there(link, source)
    lineage = lineage_of(manifest) if manifest else None
    check_lineage(folder, lineage, link.record.name)
    own, foreign = split_foreign(survey.checkpoints, run_id, manifest)
    survey = replace(survey, checkpoints=own, refused=[*survey.refused, *foreign])
    wanted = _choose(survey.checkpoints, which, newer_than, policy)
    held = [find_held(folder, one) for one in wanted]
    missing = [one for one, found in zip(wanted, held, strict=True) if found is None]
    unchanged = [
        file
        for file in survey.files
        if inspect_file(folder.root, file, with_hash=True, follow_links=False) is None
    ]
    known = {file.name for file in unchanged}
    files = [file for file in survey.files if file.name not in known]
    notes = [*_notes(survey), *_low_disk(link, survey, run_id)]
    notes += [f"afterwards: {policy.words}"] if policy else []
    pending = sum(_pending_bytes(folder, one) for one in missing)
    pending += sum(_missing_bytes(folder, file) for file in files)
    return PullPlan(
        run_id=run_id,
        source=source,
        folder=folder,
        files=files,
        unchanged=unchanged,
        checkpoints=missing,
        present=[found for found in held if found is not None],
        refused=survey.refused,
        is_listed=survey.is_listed,
        pending_bytes=max(0, pending),
        lineage=lineage,
        plan=_describe(folder, files, missing, notes),
    )


def _choose(
    available: Sequence[RemoteCheckpoint],
    which: str,
    newer_than: int | None,
    policy: RetentionPolicy | None,
) -> list[RemoteCheckpoint]:
    chosen = choose_checkpoints(available, which)
    if newer_than is not None:
        chosen += [one for one in available if one.step > newer_than and one not in chosen]
    if policy is None:
        return chosen
    steps = [one.step for one in available]
    going = plan_removal(steps, keep_last=policy.keep_last, keep_every=policy.keep_every)
    return [one for one in chosen if one.step not in going]


def _notes(survey: Survey) -> list[str]:
    """The first refusals, and how many more there are."""
    shown = [f"refused: {one.sentence}" for one in survey.refused[:_MAX_NOTES]]
    more = len(survey.refused) - _MAX_NOTES
    return [*shown, f"refused: {more} more"] if more > 0 else shown


def _low_disk(link: PodLink, survey: Survey, run_id: str) -> list[str]:
    """A warning if the pod has no room for its next two checkpoints."""
    free_bytes = read_free_bytes_there(link.transport, link.run_dir(run_id))
    size = max((one.manifest.total_bytes for one in survey.checkpoints), default=0)
    if free_bytes is None or free_bytes >= 2 * size:
        return []
    return [
        f"the pod's disk has {format_bytes(free_bytes)} free, less than two checkpoints of "
        f"{format_bytes(size)}: see `nsa-ops backup prune {run_id} --on-pod --keep 1 --plan`"
    ]


def _missing_bytes(folder: BackupFolder, file: RemoteFile) -> int:
    return max(0, file.size - bytes_here(folder.root / file.name))


def _pending_bytes(folder: BackupFolder, remote: RemoteCheckpoint) -> int:
    pulling = folder.pulling(remote.step)
    arrived = 0
    for file in remote.manifest.files:
        path = pulling / file.name
        arrived += min(file.size, path.stat().st_size if path.exists() else bytes_here(path))
    return remote.manifest.total_bytes - arrived


def _describe(
    folder: BackupFolder,
    files: Sequence[RemoteFile],
    checkpoints: Sequence[RemoteCheckpoint],
    notes: Sequence[str],
) -> Plan:
    size = format_bytes(sum(file.size for file in files))
    names = tuple(f"{file.name} sha256 {file.sha256}" for file in files)
    what = f"bring {count_of(len(files), 'file')}, {size}"
    steps = [Step("files", what, files=names, is_done=not files)]
    for one in checkpoints:
        hashes = tuple(f"{file.name} sha256 {file.sha256}" for file in one.manifest.files)
        detail = f"bring {format_bytes(one.manifest.total_bytes)} and verify every file"
        steps.append(Step(f"checkpoint {one.step}", detail, files=hashes))
    return plan_of(f"Pull into `{folder.root}`", steps, notes)


def execute_pull(
    operator: Operator, link: PodLink, planned: PullPlan, *, free_bytes: FreeBytes = read_free_bytes
) -> Pulled:
    """Bring everything that the plan names; raises the errors of `bring`, too.

    Raises:
        VerificationError: If the only thing to bring was refused, or is not what its hash says.
        StateConflictError: If the pod has another checkpoint of a step that is held.
        PartialError: If something was refused, removed or changed meanwhile; the rest was brought.
    """
    pulled = bring(operator, link, planned, free_bytes=free_bytes)
    if pulled.failure is not None:
        raise pulled.failure
    return pulled


def bring(
    operator: Operator, link: PodLink, planned: PullPlan, *, free_bytes: FreeBytes = read_free_bytes
) -> Pulled:
    """Bring what can be brought; nothing whole is replaced, and a cut file is continued.

    Raises:
        LocalResourceError: If this machine's disk has no room, before or during the pull.
        StateConflictError: If another command writes this backup, or wrote another lineage to it.
        PodUnreachableError, DeadlineError: If the link was lost; the next pull continues there.
    """
    folder, free = planned.folder, free_bytes(planned.folder.root)
    fitting, too_large = _leave_too_large(planned, free)
    check_space(folder.root, fitting.pending_bytes, free)
    intent = operator.store.intent("backup pull", planned.run_id, folder=str(folder.root))
    with (
        intent, folder.locked(), _disk_errors(folder), _link_errors(operator),
        operator.work("pulling", "bytes", fitting.pending_bytes) as work,
    ):  # fmt: skip
        transfer = Transfer(operator, link.transport, planned.source, folder, work)
        check_lineage(folder, planned.lineage, link.record.name)
        for failure in too_large:
            transfer.keep_failure(failure)
        _bring_all(transfer, planned, fitting)
        _write_latest(folder)
        here = [*planned.unchanged, *transfer.brought]
        write_backup_record(folder, _record(operator, link, planned, here))
    receipts = _receipts(operator, planned)
    ahead = still_ahead(receipts, read_beginnings(folder.run))
    newest = newest_held(one for one in ahead if Path(one.path).parent == folder.run.checkpoints)
    return Pulled(
        run_id=planned.run_id,
        folder=folder.root,
        num_files=len(transfer.brought),
        pulled_steps=transfer.pulled_steps,
        present_steps=[one.remote.step for one in planned.present],
        newest_step=newest.step if newest else None,
        num_bytes=transfer.num_bytes,
        at_risk=_at_risk(folder, newest_held(ahead)),
        problems=[Problem(one.message, one.hint, one.exit_code) for one in transfer.failures],
    )


def _leave_too_large(planned: PullPlan, free: int) -> tuple[PullPlan, list[OpsError]]:
    """The plan without what the disk has no room for, and the errors for that.

    The pod reports the sizes: a false one must not prevent the rest of the pull.
    """
    folder = planned.folder
    sizes: dict[str | int, int] = {one.name: _missing_bytes(folder, one) for one in planned.files}
    sizes |= {one.step: _pending_bytes(folder, one) for one in planned.checkpoints}
    left = choose_too_large(sizes, free)
    errors: list[OpsError] = []
    place = f"`{folder.root}`"
    for key in left:
        if isinstance(key, int):
            need = describe_need(place, f"the checkpoint of step {key}", sizes[key], free)
            errors.append(LocalResourceError(need, hint=_ROOM))
        else:
            need = describe_need(place, f"the file {show_name(key)}", sizes[key], free)
            errors.append(PartialError(need, hint=_ROOM))
    kept = replace(
        planned,
        files=[one for one in planned.files if one.name not in left],
        checkpoints=[one for one in planned.checkpoints if one.step not in left],
        pending_bytes=sum(size for key, size in sizes.items() if key not in left),
    )
    return kept, errors


def _receipts(operator: Operator, planned: PullPlan) -> list[Receipt]:
    """Receipts of this lineage; a backup of another lineage does not protect this one."""
    receipts, lineage = operator.store.receipts(planned.run_id), planned.lineage
    if lineage is None:
        return receipts
    return receipts_of(receipts, lineage.attempt, lineage.ids.get(lineage.attempt, ""))


def _bring_all(transfer: Transfer, planned: PullPlan, fitting: PullPlan) -> None:
    transfer.refuse(planned.refused)
    transfer.bring_files(fitting.files)
    if planned.is_listed:
        transfer.put_away_gone([*planned.files, *planned.unchanged], planned.refused)
    transfer.bring_checkpoints(planned.run_id, fitting.checkpoints)
    transfer.confirm(planned.run_id, planned.present)


def _record(
    operator: Operator, link: PodLink, planned: PullPlan, here: Sequence[RemoteFile]
) -> BackupRecord:
    """The files in the backup now, apart from checkpoints; also those of earlier pulls."""
    before = read_backup_record(planned.folder)
    files = {file.name: file for file in before.files} if before else {}
    files |= {f.name: CheckpointFile(name=f.name, size=f.size, sha256=f.sha256) for f in here}
    root = planned.folder.root
    return BackupRecord(
        run_id=planned.run_id,
        pod=link.record.name,
        source=str(planned.source),
        pulled_unix_s=operator.clock.unix_s(),
        files=[file for name, file in files.items() if path_fault(root, name) is None],
        lineage=planned.lineage,
    )


def _at_risk(folder: BackupFolder, saved: Receipt | None) -> AtMostLost:
    """What the pod has done since the backup, by the heartbeats that were just pulled."""
    beats = read_last_records(folder.run.heartbeat(), Heartbeat).records
    last_step = beats[-1].step if beats else (saved.step if saved else 0)
    return at_most_lost(last_step=last_step, saved=saved, step_s=median_step_s(beats))


@contextmanager
def _disk_errors(folder: BackupFolder) -> Iterator[None]:
    """Turn a full or read-only disk in the middle of a pull into one clear error."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = "is full" if full else f"cannot be written: {error.strerror}"
        message = f"The disk of `{folder.root}` {what}; what arrived before is kept"
        raise LocalResourceError(message, hint="Free space and pull again: it continues") from error


@contextmanager
def _link_errors(operator: Operator) -> Iterator[None]:
    try:
        yield
    except (PodUnreachableError, DeadlineError):
        operator.tell("what has arrived is kept; `nsa-ops backup pull` continues there")
        raise


def _write_latest(folder: BackupFolder) -> None:
    """Let `latest` name the newest whole checkpoint of the backup that nothing has abandoned."""
    steps = [one.step for one in list_checkpoints(folder.run)]
    if steps:
        newest = folder.run.checkpoint(steps_ahead(folder.run, steps)[0])
        write_text(folder.run.latest, newest.name + "\n")
