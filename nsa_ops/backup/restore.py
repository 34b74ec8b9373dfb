"""Put a verified backup back as a run directory, here or on a pod, where the run can be resumed."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import fsync_dir, write_text
from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    Flaw,
    hash_file,
    list_checkpoints,
)
from nsa_core.rundir.layout import RUN_ID, RunDir
from nsa_core.rundir.names import path_fault, show_name
from nsa_ops.backup.disk import (
    ask,
    check_copies,
    check_space,
    check_space_there,
    read_free_bytes,
    send_file,
    send_folder,
)
from nsa_ops.backup.folder import (
    RECORD_NAME,
    RESERVED,
    BackupFolder,
    read_backup_record,
)
from nsa_ops.backup.receipts import steps_ahead
from nsa_ops.backup.verification import (
    Verification,
    check_verified,
    verify_backup,
)
from nsa_ops.clock import Clock
from nsa_ops.context import PodLink, Tell
from nsa_ops.errors import (
    LocalResourceError,
    NotFoundError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.quantities import count_of, format_bytes
from nsa_ops.remote.files import list_files
from nsa_ops.remote.inbound import (
    Refusal,
    check_folder,
    check_path,
    make_parents,
    reserve,
    screen,
    summarize,
)
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.store import Receipt

_RESTORING = ".restoring_"


@dataclass(frozen=True)
class RestorePlan:
    """What a restore will do.

    Attributes:
        source: The backup.
        files: Files to copy, relative to the backup.
        step: Step that the restored run will resume from.
        target: Run directory to make.
    """

    run_id: str
    source: Path
    files: list[PurePosixPath]
    step: int
    target: str
    plan: Plan

    @property
    def total_bytes(self) -> int:
        """Size of the files."""
        return sum((self.source / file).stat().st_size for file in self.files)


@dataclass(frozen=True)
class Drilled:
    """A restore that was tried and removed again; `step` is where a resume would continue."""

    run_id: str
    step: int
    num_files: int
    num_tensors: int
    seconds: float


@dataclass(frozen=True)
class Restored:
    """A run directory that was made and hashed again where it now is."""

    run_id: str
    target: str
    step: int
    num_files: int


def plan_restore(
    folder: BackupFolder,
    runs_root: PurePosixPath,
    *,
    link: PodLink | None = None,
    receipts: Sequence[Receipt] = (),
    newest_only: bool = False,
    may_exist: bool = False,
) -> RestorePlan:
    """Verify every byte of the backup, and plan what is copied where.

    A checkpoint that a later attempt has abandoned stays in the backup: a resume begins at the
    highest step, and would go on from it.

    Args:
        folder: The backup.
        runs_root: Folder that gets the run directory.
        link: Pod of that folder; None for this machine.
        receipts: Receipts of the run.
        newest_only: Copy only the newest whole checkpoint, and ignore damaged ones.
        may_exist: What is there under its id is moved away before the restore.

    Raises:
        StateConflictError: If the run exists there.
        VerificationError: If anything in the backup is not what was pulled.
        NotFoundError: If it holds no whole checkpoint or no manifest.
    """
    run_id = run_id_of(folder)
    target = runs_root / run_id
    if not may_exist:
        _refuse_existing(target, link)
    verification = verify_backup(folder.root, load=True, receipts=receipts)
    passed_over = _in_checkpoints(folder, verification) if newest_only else []
    wanted = [one for one in verification.differences if one not in passed_over]
    check_verified(replace(verification, differences=wanted))
    if not verification.steps or not folder.run.manifest.is_file():
        lacking = "checkpoint" if not verification.steps else "manifest.json"
        message = f"The backup `{folder.root}` has no {lacking}, so it cannot be resumed"
        raise NotFoundError(message, hint="Pull it with `nsa-ops backup pull`")
    ahead = steps_ahead(folder.run, verification.steps)
    steps = ahead[:1] if newest_only else ahead
    files = files_of(folder, replace(verification, steps=steps))
    size = sum((folder.root / file).stat().st_size for file in files)
    step = Step("copy", f"copy {count_of(len(files), 'file')}, {format_bytes(size)}, to `{target}`")
    check = Step("verify", "hash every file again at its new place, then give it its name")
    notes = [f"passed over: {one.sentence}" for one in passed_over]
    notes += [f"left out: {one.sentence}" for one in _left_out(folder)]
    notes += [
        f"left out: the checkpoint of step {one}, which a later attempt abandoned"
        for one in verification.steps
        if one not in ahead
    ]
    plan = plan_of(f"Restore `{run_id}` at step {steps[0]}", [step, check], notes)
    return RestorePlan(run_id, folder.root, files, steps[0], str(target), plan)


def _in_checkpoints(folder: BackupFolder, verification: Verification) -> list[Flaw]:
    """Damage of checkpoints; they are not among the steps of a verification."""
    return [one for one in verification.differences if folder.run.checkpoints in one.path.parents]


def run_id_of(folder: BackupFolder) -> str:
    """The run of a backup: what its record says, else the folder's own name.

    Raises:
        VerificationError: If the folder has no record, and its name is no run id.
    """
    record = read_backup_record(folder)
    run_id = record.run_id if record else folder.root.name
    if not RUN_ID.fullmatch(run_id):
        message = f"`{folder.root}` has no readable {RECORD_NAME}, and its name is no run id"
        raise VerificationError(message, hint="Pull the run again, or rename the folder")
    return run_id


def files_of(folder: BackupFolder, verification: Verification) -> list[PurePosixPath]:
    """Files of the run that were just verified; nothing else in the folder is restored."""
    record = read_backup_record(folder)
    small = record.files if record else _small_files(folder)[0]
    names = [PurePosixPath(file.name) for file in small]
    for checkpoint in list_checkpoints(folder.run):
        is_named = checkpoint.path == folder.run.checkpoint(checkpoint.step)
        if is_named and checkpoint.step in verification.steps:
            within = [*(file.name for file in checkpoint.manifest.files), MANIFEST_NAME]
            names += [PurePosixPath("checkpoints", checkpoint.path.name, one) for one in within]
    return names


def _left_out(folder: BackupFolder) -> list[Refusal]:
    return [] if read_backup_record(folder) else _small_files(folder)[1]


def _small_files(folder: BackupFolder) -> tuple[list[CheckpointFile], list[Refusal]]:
    """Files outside checkpoints/ of a copy that was not made by `backup pull`; links stay out."""
    found: list[CheckpointFile] = []
    refused: list[Refusal] = []
    for path in sorted(folder.root.rglob("*")):
        name = str(path.relative_to(folder.root))
        if name.partition("/")[0] == "checkpoints" or (path.is_dir() and not path.is_symlink()):
            continue
        fault = path_fault(folder.root, name)
        if fault is not None:
            refused.append(Refusal(show_name(name), f"is {fault}"))
        else:
            found.append(
                CheckpointFile(name=name, size=path.stat().st_size, sha256=hash_file(path))
            )
    files, others = screen(found)
    files, ours = reserve(files, RESERVED)
    return files, [*refused, *others, *ours]


def restore_here(planned: RestorePlan) -> Restored:
    """Make the run directory on this machine: copy beside, hash, rename.

    Raises:
        StateConflictError: If the run exists there.
        LocalResourceError: If the disk has no room or cannot be written.
        VerificationError: If a copy does not have the hash of its original.
    """
    target = Path(planned.target)
    _refuse_existing(PurePosixPath(target), None)
    check_space(target, planned.total_bytes, read_free_bytes(target))
    temporary = target.with_name(f"{_RESTORING}{target.name}")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        for file in planned.files:
            _copy_verified(planned.source, temporary, str(file))
        write_text(RunDir(temporary).latest, RunDir(temporary).checkpoint(planned.step).name + "\n")
        temporary.rename(target)
        fsync_dir(target.parent)
    except OSError as error:
        message = f"`{target}` cannot be written: {error.strerror}"
        raise LocalResourceError(message, hint="Name another folder with `--to`") from error
    return Restored(planned.run_id, planned.target, planned.step, len(planned.files))


def drill_restore(
    folder: BackupFolder, receipts: Sequence[Receipt], clock: Clock, parent: Path
) -> Drilled:
    """Restore into a temporary folder below `parent`, and open every file of it there.

    Raises:
        VerificationError: If the backup or its copy is damaged.
        LocalResourceError: If the disk has no room.
    """
    began_s = clock.monotonic_s()
    with tempfile.TemporaryDirectory(prefix=".drill_", dir=parent) as scratch:
        restored = restore_here(plan_restore(folder, PurePosixPath(scratch), receipts=receipts))
        found = verify_backup(Path(restored.target), load=True)
        check_verified(found)
    seconds = clock.monotonic_s() - began_s
    return Drilled(restored.run_id, restored.step, restored.num_files, found.num_tensors, seconds)


def _refuse_existing(target: PurePosixPath, link: PodLink | None) -> None:
    here = Path(target)
    if _exists(link, target) if link else here.exists() or here.is_symlink():
        message = f"`{target}` exists, and a restore replaces nothing"
        hint = f"See `nsa-ops status {target.name}`, or restore elsewhere with `--to`"
        raise StateConflictError(message, hint=hint)


def _exists(link: PodLink, path: PurePosixPath) -> bool:
    return link.transport.run(("test", "-e", str(path)), timeout_s=QUICK_S).exit_code == 0


def _copy_verified(source: Path, target: Path, name: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    check_path(source, name)
    copy = make_parents(target, name)
    shutil.copyfile(source / name, copy, follow_symlinks=False)
    expected, found = hash_file(source / name), hash_file(copy)
    if expected != found:
        message = f"`{copy}` has sha256 {found} after copying, and {expected} was expected"
        raise VerificationError(message, hint="This disk may be failing")


def restore_to_pod(link: PodLink, planned: RestorePlan, tell: Tell) -> Restored:
    """Make the run directory on a pod: copy beside, hash there, rename; a cut one is continued.

    Raises:
        StateConflictError: If the run exists there.
        LocalResourceError: If the pod's disk has no room.
        VerificationError: If a copy does not have the hash of its original.
        PartialError: If a command fails on the pod; the run's name is not taken then.
    """
    transport, target = link.transport, PurePosixPath(planned.target)
    temporary = target.with_name(f"{_RESTORING}{target.name}")
    _refuse_existing(target, link)
    check_space_there(transport, target, planned.total_bytes)
    try:
        _send(link, planned, temporary, tell)
        _check_copies(link, planned, temporary)
    except VerificationError:
        ask(transport, "rm", "-rf", "--", str(temporary))  # the next restore starts again
        raise
    latest = RunDir(planned.source).checkpoint(planned.step).name
    script = 'echo "$1" > "$2"'
    ask(transport, "sh", "-c", script, "sh", latest, str(temporary / "checkpoints/latest"))
    # -T: never into a directory of that name that someone made meanwhile.
    ask(transport, "mv", "-T", "-n", "--", str(temporary), str(target))
    if _exists(link, temporary):
        _refuse_existing(target, link)
    return Restored(planned.run_id, planned.target, planned.step, len(planned.files))


def _send(link: PodLink, planned: RestorePlan, temporary: PurePosixPath, tell: Tell) -> None:
    """Checkpoints as folders, the other files one by one."""
    large = [file for file in planned.files if file.parts[0] == "checkpoints"]
    small = [file for file in planned.files if file not in large]
    folders = sorted({str(temporary / file.parent) for file in planned.files})
    ask(link.transport, "mkdir", "-p", "--", *folders)
    for file in small:
        send_file(link.transport, planned.source, str(file), temporary)
    for folder in sorted({file.parent for file in large}):
        tell(f"sending `{folder}`")
        check_folder(planned.source, str(folder))
        names = [file.name for file in large if file.parent == folder]
        send_folder(link.transport, planned.source / folder, temporary / folder, names, tell)


def _check_copies(link: PodLink, planned: RestorePlan, temporary: PurePosixPath) -> None:
    """Compare the hash of every copy; files that an earlier, cut restore left are removed."""
    listing = list_files(link.transport, temporary)
    if listing.refused:
        message = f"`{temporary}` holds what was not sent: {summarize(listing.refused)}"
        raise VerificationError(message, hint="Restore again, to another folder")
    there = {file.name: file.sha256 for file in listing.files}
    strangers = sorted(there.keys() - {str(file) for file in planned.files})
    if strangers:
        names = [str(temporary / name) for name in strangers]
        ask(link.transport, "rm", "-f", "--", *names)
    check_copies(link.transport, there, planned.source, temporary, map(str, planned.files))
