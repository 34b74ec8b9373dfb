"""Pull a run from its pod: small files, then checkpoints, each whole before it counts."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import fsync_dir, write_bytes, write_text
from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    Checkpoint,
    CheckpointFile,
    hash_file,
    list_checkpoints,
    read_checkpoint,
)
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.jsonl import read_last_records
from nsa_ops.errors import (
    DeadlineError,
    LocalResourceError,
    OpsError,
    PartialError,
    PodUnreachableError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.remote.files import RemoteFile, bytes_here, is_here, pull_file
from nsa_ops.remote.transport import Transport
from nsa_ops.runs.backup.folder import (
    RESERVE_BYTES,
    BackupFolder,
    BackupRecord,
    move_aside,
    read_backup_record,
    read_free_bytes,
    write_backup_record,
)
from nsa_ops.runs.backup.loss import AtMostLost, at_most_lost, median_step_s
from nsa_ops.runs.backup.survey import RemoteCheckpoint, choose_checkpoints, read_survey
from nsa_ops.runs.backup.verify import checkpoint_damage
from nsa_ops.runs.context import Operator, PodLink
from nsa_ops.runs.quantities import format_bytes
from nsa_ops.store import Receipt

FreeBytes = Callable[[Path], int]


@dataclass(frozen=True)
class PullPlan:
    """What one pull will bring.

    Attributes:
        run_id: Run.
        source: Its directory on the pod.
        folder: The backup here.
        files: Small files that differ or are new.
        unchanged: Small files that are here already.
        checkpoints: Wanted checkpoints that are not here whole.
        present: Wanted checkpoints that are here, hashed again just now.
        pending_bytes: Bytes that are still to come.
        plan: The same for people.
    """

    run_id: str
    source: PurePosixPath
    folder: BackupFolder
    files: list[RemoteFile]
    unchanged: list[RemoteFile]
    checkpoints: list[RemoteCheckpoint]
    present: list[RemoteCheckpoint]
    pending_bytes: int
    plan: Plan


@dataclass(frozen=True)
class Pulled:
    """What a pull brought.

    Attributes:
        run_id: Run.
        folder: The backup.
        num_files: Small files that were brought.
        pulled_steps: Checkpoints that were brought.
        present_steps: Checkpoints that were here already and whole.
        newest_step: Newest whole checkpoint of the backup; None without one.
        num_bytes: Bytes that came over the link.
        at_risk: What would be lost if the pod were gone now.
    """

    run_id: str
    folder: Path
    num_files: int
    pulled_steps: list[int]
    present_steps: list[int]
    newest_step: int | None
    num_bytes: int
    at_risk: AtMostLost


def plan_pull(link: PodLink, run_id: str, folder: BackupFolder, which: str) -> PullPlan:
    """Compare the pod's run directory with the backup; changes nothing.

    Args:
        link: The pod.
        run_id: Run.
        folder: The backup, which need not exist.
        which: `latest`, `all`, `none` or a step.

    Raises:
        NotFoundError: If run or checkpoint do not exist.
    """
    source = link.run_dir(run_id)
    survey = read_survey(link.transport, source)
    wanted = choose_checkpoints(survey.checkpoints, which)
    missing = [one for one in wanted if not _is_whole_here(folder, one)]
    files = [file for file in survey.files if not _is_file_here(folder, file)]
    pending = sum(_pending_bytes(folder, one) for one in missing)
    pending += sum(file.size - bytes_here(folder.root / file.name) for file in files)
    return PullPlan(
        run_id=run_id,
        source=source,
        folder=folder,
        files=files,
        unchanged=[file for file in survey.files if file not in files],
        checkpoints=missing,
        present=[one for one in wanted if one not in missing],
        pending_bytes=max(0, pending),
        plan=_describe(folder, files, missing, survey.unreadable),
    )


def _is_file_here(folder: BackupFolder, file: RemoteFile) -> bool:
    return is_here(folder.root / file.name, size=file.size, sha256=file.sha256)


def _is_whole_here(folder: BackupFolder, remote: RemoteCheckpoint) -> bool:
    """Whether this very checkpoint is here and all its hashes agree now."""
    path = folder.run.checkpoint(remote.step)
    local = read_checkpoint(path)
    if local is None or (path / MANIFEST_NAME).read_bytes() != remote.content:
        return False
    return not checkpoint_damage(local)


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
    unreadable: Sequence[str],
) -> Plan:
    size = format_bytes(sum(file.size for file in files))
    names = tuple(f"{file.name} sha256 {file.sha256}" for file in files)
    steps = [Step("files", f"bring {len(files)} files, {size}", files=names, is_done=not files)]
    for one in checkpoints:
        hashes = tuple(f"{file.name} sha256 {file.sha256}" for file in one.manifest.files)
        detail = f"bring {format_bytes(one.manifest.total_bytes)} and verify every file"
        steps.append(Step(f"checkpoint {one.step}", detail, files=hashes))
    notes = [f"`{name}` on the pod has no proper manifest and is left alone" for name in unreadable]
    return plan_of(f"Pull into `{folder.root}`", steps, notes)


def execute_pull(
    operator: Operator, link: PodLink, planned: PullPlan, *, free_bytes: FreeBytes = read_free_bytes
) -> Pulled:
    """Bring what the plan names; what is whole stays whole, what was cut is continued.

    Raises:
        LocalResourceError: If this machine's disk has no room, before or during the pull.
        StateConflictError: If another command writes this backup.
        PartialError: If something vanished or changed on the pod meanwhile; the rest was brought.
        PodUnreachableError, DeadlineError: If the link was lost; the next pull continues there.
    """
    folder = planned.folder
    check_space(folder.root, planned.pending_bytes, free_bytes(folder.root))
    pull = _Pull(operator, link.transport, planned)
    subject = operator.store.intent("backup pull", planned.run_id, folder=str(folder.root))
    with subject, folder.locked(), _disk_errors(folder), _link_errors(operator):
        pull.bring_files()
        pull.put_away_gone_files()
        pull.bring_checkpoints()
        _write_latest(folder)
        write_backup_record(folder, pull.record(link.record.name))
        pull.check_nothing_failed()
    newest = list_checkpoints(folder.run)
    return Pulled(
        run_id=planned.run_id,
        folder=folder.root,
        num_files=len(pull.brought),
        pulled_steps=pull.pulled_steps,
        present_steps=[one.step for one in planned.present],
        newest_step=newest[0].step if newest else None,
        num_bytes=pull.num_bytes,
        at_risk=_at_risk(folder, newest[0].step if newest else None),
    )


def _at_risk(folder: BackupFolder, saved_step: int | None) -> AtMostLost:
    """What the pod has beyond the backup, as the heartbeats that were just pulled tell."""
    beats = read_last_records(folder.run.heartbeat(), Heartbeat).records
    last_step = beats[-1].step if beats else saved_step or 0
    step_s = median_step_s(beats)
    return at_most_lost(last_step=last_step, saved_step=saved_step, step_s=step_s)


def check_space(root: Path, pending_bytes: int, free_bytes: int) -> None:
    """Raise LocalResourceError unless the disk has room for the bytes and a reserve."""
    if free_bytes < pending_bytes + RESERVE_BYTES:
        message = (
            f"The disk of `{root}` has {format_bytes(free_bytes)} free, and the backup needs "
            f"{format_bytes(pending_bytes)} and {format_bytes(RESERVE_BYTES)} to spare"
        )
        raise LocalResourceError(message, hint="Free space, or name another disk with `--dest`")


@contextmanager
def _disk_errors(folder: BackupFolder) -> Iterator[None]:
    """A full or read-only disk in the middle of a pull becomes one clear line."""
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


class _Pull:
    """One pull under way: what it brought so far and what failed."""

    def __init__(self, operator: Operator, transport: Transport, planned: PullPlan) -> None:
        self._operator = operator
        self._transport = transport
        self._planned = planned
        self._folder = planned.folder
        self._failures: list[OpsError] = []
        self.brought: list[RemoteFile] = []
        self.pulled_steps: list[int] = []
        self.num_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def bring_files(self) -> None:
        """Small files; one that changed or vanished meanwhile is left for the next pull."""
        for file in self._planned.files:
            target = self._folder.root / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._bring(self._planned.source / file.name, target, file.size, file.sha256)
            except OpsError as error:
                self._keep_failure(error)
                continue
            self.brought.append(file)

    def put_away_gone_files(self) -> None:
        """What the pod has no longer, such as the exit record of an earlier attempt, makes room."""
        before = read_backup_record(self._folder)
        there = {file.name for file in (*self._planned.files, *self._planned.unchanged)}
        for file in before.files if before else []:
            path = self._folder.root / file.name
            if file.name not in there and path.is_file():
                kept = self._folder.gone / file.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                path.replace(kept)

    def bring_checkpoints(self) -> None:
        """Checkpoints, newest first, each with a receipt when it is whole."""
        for remote in self._planned.present:
            self._operator.store.save_receipt(self._receipt(remote))
        for remote in self._planned.checkpoints:
            size = format_bytes(remote.manifest.total_bytes)
            self._operator.tell(f"checkpoint of step {remote.step}: {size}")
            try:
                self._bring_checkpoint(remote)
            except OpsError as error:
                self._keep_failure(error)
                continue
            self.pulled_steps.append(remote.step)
            self._operator.store.save_receipt(self._receipt(remote))

    def _keep_failure(self, error: OpsError) -> None:
        """A lost link ends the pull; anything else ends only this file or checkpoint."""
        if isinstance(error, PodUnreachableError | DeadlineError):
            raise error
        self._operator.tell(error.message)
        self._failures.append(error)

    def _bring(self, source: PurePosixPath, target: Path, size: int, sha256: str) -> None:
        pull_file(self._transport, source, target, size=size, sha256=sha256, on_bytes=self._count)

    def _bring_checkpoint(self, remote: RemoteCheckpoint) -> None:
        """Collect beside the final name, manifest last, then rename the folder."""
        pulling = self._folder.pulling(remote.step)
        pulling.mkdir(parents=True, exist_ok=True)
        (pulling / MANIFEST_NAME).unlink(missing_ok=True)
        for file in remote.manifest.files:
            self._bring(remote.folder / file.name, pulling / file.name, file.size, file.sha256)
        self._drop_strangers(pulling, remote)
        write_bytes(pulling / MANIFEST_NAME, remote.content)
        final = self._folder.run.checkpoint(remote.step)
        if final.exists():
            self._make_room(final, remote.step)
        pulling.rename(final)
        fsync_dir(final.parent)

    def _drop_strangers(self, pulling: Path, remote: RemoteCheckpoint) -> None:
        """Files of another checkpoint of this step, left by a pull that was cut."""
        wanted = {file.name for file in remote.manifest.files}
        for path in pulling.iterdir():
            if path.name not in wanted:
                path.unlink()

    def _make_room(self, final: Path, step: int) -> None:
        """What stands at the final name is other content or damaged: keep it under another name."""
        local = read_checkpoint(final)
        is_good = local is not None and not checkpoint_damage(local)
        kept = move_aside(self._folder, step, "replaced" if is_good else "damaged")
        self._operator.tell(f"what stood at step {step} is kept as `{kept.name}`")

    def _receipt(self, remote: RemoteCheckpoint) -> Receipt:
        final = self._folder.run.checkpoint(remote.step)
        now = self._operator.clock.unix_s()
        known = self._operator.store.receipts(self._planned.run_id)
        pulled = {one.path: one.pulled_unix_s for one in known if remote in self._planned.present}
        return Receipt(
            run_id=self._planned.run_id,
            step=remote.step,
            path=str(final),
            total_bytes=remote.manifest.total_bytes,
            manifest_sha256=hash_file(final / MANIFEST_NAME),
            pulled_unix_s=pulled.get(str(final), now),
            verified_unix_s=now,
        )

    def record(self, pod: str) -> BackupRecord:
        """What stands in the backup now, apart from checkpoints."""
        here = [*self._planned.unchanged, *self.brought]
        return BackupRecord(
            run_id=self._planned.run_id,
            pod=pod,
            source=str(self._planned.source),
            pulled_unix_s=self._operator.clock.unix_s(),
            files=[CheckpointFile(name=f.name, size=f.size, sha256=f.sha256) for f in here],
        )

    def check_nothing_failed(self) -> None:
        """Raise the only failure as it is, or PartialError over several."""
        if len(self._failures) == 1 and not self.brought and not self.pulled_steps:
            raise self._failures[0]
        if self._failures:
            count = len(self._failures)
            message = f"{count} of the pod's files were not brought: {self._failures[0].message}"
            hint = "They changed while they were read; pull again"
            raise PartialError(message, hint=hint) from self._failures[0]


def _write_latest(folder: BackupFolder) -> None:
    """Let `latest` name the newest whole checkpoint of the backup."""
    newest: list[Checkpoint] = list_checkpoints(folder.run)
    if newest:
        write_text(folder.run.latest, newest[0].path.name + "\n")
