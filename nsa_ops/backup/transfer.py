"""One pull under way: bring files and checkpoints, keep what failed, and what was brought."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import fsync_dir, write_bytes
from nsa_core.rundir.checkpoint import MANIFEST_NAME, hash_file
from nsa_core.rundir.events import read_beginnings
from nsa_core.rundir.names import path_fault, show_name
from nsa_ops.backup.folder import BackupFolder, move_aside, read_backup_record
from nsa_ops.backup.receipts import AtMostLost, is_left_behind
from nsa_ops.backup.survey import RemoteCheckpoint, list_run_files
from nsa_ops.backup.verification import HeldCheckpoint, is_held_good, is_whole_at, mark_of
from nsa_ops.context import Operator, Work
from nsa_ops.errors import (
    DeadlineError,
    LocalResourceError,
    NotFoundError,
    OpsError,
    PartialError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.quantities import count_of, format_bytes
from nsa_ops.remote.files import is_here, pull_file
from nsa_ops.remote.inbound import Refusal, RemoteFile, make_parents
from nsa_ops.remote.many_files import SMALL_BYTES, pull_small_files
from nsa_ops.remote.transport import Transport
from nsa_ops.store import Receipt

#: A live run rewrites small files (the watchdog's verdict every few seconds) while we read them.
ROUNDS = 3
_MAX_REFUSALS = 100
#: What a disk says to a name that it cannot have.
_NAME_ERRORS = frozenset({errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR})


_KINDS: dict[int, type[OpsError]] = {
    kind.exit_code: kind
    for kind in (NotFoundError, StateConflictError, VerificationError, LocalResourceError)
}


@dataclass(frozen=True)
class Problem:
    """One thing that a pull did not bring, or not under its name; as an error it has a code."""

    message: str
    hint: str
    exit_code: int

    @property
    def is_conflict(self) -> bool:
        """The pod has another checkpoint of a step that is held."""
        return self.exit_code == StateConflictError.exit_code

    @property
    def error(self) -> OpsError:
        """The problem as an error."""
        return _KINDS.get(self.exit_code, PartialError)(self.message, hint=self.hint)


@dataclass(frozen=True)
class Pulled:
    """What a pull brought.

    Attributes:
        num_files: Small files that were brought.
        pulled_steps: Checkpoints that were brought.
        present_steps: Checkpoints that were here already and whole.
        newest_step: Newest checkpoint of the backup with a true receipt that no later attempt has
            abandoned; None without one.
        num_bytes: Bytes that came over the link.
        at_risk: What would be lost if the pod disappeared now.
        problems: What was refused, failed, or contradicts the backup.
    """

    run_id: str
    folder: Path
    num_files: int
    pulled_steps: list[int]
    present_steps: list[int]
    newest_step: int | None
    num_bytes: int
    at_risk: AtMostLost
    problems: list[Problem]

    @property
    def failure(self) -> OpsError | None:
        """The error of the whole pull; the only problem itself if nothing else was brought."""
        if not self.problems:
            return None
        first = next((one for one in self.problems if one.is_conflict), self.problems[0])
        is_alone = len(self.problems) == 1 and not self.num_files and not self.pulled_steps
        has_no_room = all(one.exit_code == LocalResourceError.exit_code for one in self.problems)
        if first.is_conflict or is_alone or has_no_room:
            return first.error
        what = count_of(len(self.problems), "problem")
        message = f"The pull is not complete, with {what}: {first.message}"
        return PartialError(message, hint=first.hint)


class Transfer:
    """Brings the files of one run into one backup; the caller holds the folder's lock."""

    def __init__(
        self,
        operator: Operator,
        transport: Transport,
        source: PurePosixPath,
        folder: BackupFolder,
        work: Work,
    ) -> None:
        self._operator = operator
        self._work = work
        self._transport = transport
        self._source = source
        self._folder = folder
        self.failures: list[OpsError] = []
        self.brought: list[RemoteFile] = []
        self.pulled_steps: list[int] = []
        self.num_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._work.add(num_bytes)

    def refuse(self, refused: Sequence[Refusal]) -> None:
        """Keep what the survey refused as failures of this pull; beyond a limit only the number."""
        hint = "It is left alone; check it on the pod"
        for one in refused[:_MAX_REFUSALS]:
            self.keep_failure(VerificationError(f"Refused: {one.sentence}", hint=hint))
        more = len(refused) - _MAX_REFUSALS
        if more > 0:
            self.keep_failure(
                VerificationError(f"Refused: {count_of(more, 'more name')}", hint=hint)
            )

    def bring_files(self, files: Sequence[RemoteFile]) -> None:
        """Small files; one that was rewritten meanwhile is looked at again and brought then."""
        failures = self._bring_round(files)
        for _ in range(ROUNDS - 1):
            if not failures:
                return
            try:
                now = list_run_files(self._transport, self._source).files
            except VerificationError as error:
                self.keep_failure(error)
                break
            failures = self._bring_round([file for file in now if file.name in failures])
        for failure in failures.values():
            self.keep_failure(failure)

    def _bring_round(self, files: Sequence[RemoteFile]) -> dict[str, OpsError]:
        """Try each file once; the failures by name. A lost link ends the pull."""
        failures, surplus = self._bring_into(
            self._folder.root, self._source, files, self.brought.append
        )
        if surplus is not None:
            self.keep_failure(surplus)
        return failures

    def _bring_into(
        self,
        root: Path,
        source: PurePosixPath,
        files: Sequence[RemoteFile],
        on_file: Callable[[RemoteFile], object],
    ) -> tuple[dict[str, OpsError], OpsError | None]:
        """Bring files of a folder: the small ones together, each large one by itself."""
        failures: dict[str, OpsError] = {}
        small: list[tuple[RemoteFile, Path]] = []
        large: list[tuple[RemoteFile, Path]] = []
        for file in files:
            try:
                target = _make_place(root, file.name)
            except OpsError as error:
                failures[file.name] = error
                continue
            if file.size > SMALL_BYTES:
                large.append((file, target))
            elif is_here(target, size=file.size, sha256=file.sha256):
                on_file(file)
            else:
                small.append((file, target))
        done = pull_small_files(
            self._transport, source, small, on_bytes=self._count, on_file=on_file
        )
        for file, target in large:
            failure = self._bring_large(source / file.name, target, file)
            if failure is None:
                on_file(file)
            else:
                failures[file.name] = failure
        return failures | done.failures, done.surplus

    def _bring_large(
        self, source: PurePosixPath, target: Path, file: RemoteFile
    ) -> OpsError | None:
        """Bring one file by itself; the error if it failed. A lost link ends the pull."""
        try:
            pull_file(
                self._transport, source, target,
                size=file.size, sha256=file.sha256, on_bytes=self._count,
            )  # fmt: skip
        except (PodUnreachableError, DeadlineError):
            raise
        except OpsError as error:
            return error
        return None

    def put_away_gone(self, there: Sequence[RemoteFile], refused: Sequence[Refusal]) -> None:
        """Move away what the pod has removed, such as the exit record of an earlier attempt.

        A refused name is not removed; what an earlier pull moved away is never replaced.
        """
        before = read_backup_record(self._folder)
        kept = {show_name(file.name) for file in there} | {one.name for one in refused}
        for file in before.files if before else []:
            is_here = path_fault(self._folder.root, file.name) is None
            if show_name(file.name) not in kept and is_here:
                self._folder.gone.mkdir(exist_ok=True)
                path = self._folder.root / file.name
                path.replace(_free_name(make_parents(self._folder.gone, file.name), path))

    def bring_checkpoints(self, run_id: str, remotes: Sequence[RemoteCheckpoint]) -> None:
        """Checkpoints that are not here, each with a receipt as soon as it is whole."""
        for remote in remotes:
            if is_whole_at(self._folder.run.checkpoint(remote.step), remote):
                continue
            size = format_bytes(remote.manifest.total_bytes)
            self._operator.tell(f"checkpoint of step {remote.step}: {size}")
            self._work.detail = f"checkpoint of step {remote.step}"
            try:
                self._bring_checkpoint(remote)
            except (PodUnreachableError, DeadlineError):
                raise
            except OpsError as error:
                self.keep_failure(error)
                continue
            self.pulled_steps.append(remote.step)
            self._save_receipt(run_id, remote)

    def _bring_checkpoint(self, remote: RemoteCheckpoint) -> None:
        """Collect beside the final name, manifest last, then rename the folder."""
        final = self._folder.run.checkpoint(remote.step)
        pulling = self._folder.pulling(remote.step)
        run_id = remote.manifest.run_id
        what = "damaged"
        if is_held_good(final, run_id, self._operator.store.receipts(run_id)):
            what = "abandoned"
            if not self._has_abandoned(final, remote):
                self._keep_conflict(pulling, remote)
        self._collect(pulling, remote)
        if final.exists() or final.is_symlink():
            kept = move_aside(self._folder, remote.step, what)
            self._operator.tell(f"the {what} checkpoint of step {remote.step} is now `{kept.name}`")
        pulling.rename(final)
        fsync_dir(final.parent)

    def _has_abandoned(self, held: Path, remote: RemoteCheckpoint) -> bool:
        """Whether the run went back behind a held checkpoint before it saved this one."""
        beginnings = read_beginnings(self._folder.run)
        known = [one for one in beginnings if one.attempt <= remote.manifest.attempt]
        return is_left_behind(held, remote.step, known)

    def _collect(self, pulling: Path, remote: RemoteCheckpoint) -> None:
        """Bring every file of a checkpoint into a folder, verified; the manifest comes last."""
        if pulling.is_symlink():
            pulling.unlink()
        pulling.mkdir(parents=True, exist_ok=True)
        (pulling / MANIFEST_NAME).unlink(missing_ok=True)
        files = [RemoteFile(one.name, one.size, one.sha256) for one in remote.manifest.files]
        failures, surplus = self._bring_into(pulling, remote.folder, files, _forget)
        for error in [*failures.values(), *([surplus] if surplus else [])]:
            raise error
        _drop_strangers(pulling, remote)
        write_bytes(pulling / MANIFEST_NAME, remote.content)

    def _keep_conflict(self, pulling: Path, remote: RemoteCheckpoint) -> None:
        """Keep a second checkpoint of a step beside the whole one that the backup has.

        Raises:
            StateConflictError: Always; the first one stays as it is, with its receipt.
        """
        kept = self._folder.conflicting(remote.step, remote.sha256)
        if not is_whole_at(kept, remote):
            self._collect(pulling, remote)
            if kept.exists() or kept.is_symlink():
                kept.replace(_free_name(kept.with_name(f"damaged_{kept.name}"), kept))
            pulling.rename(kept)
            fsync_dir(kept.parent)
        held = self._folder.run.checkpoint(remote.step)
        message = (
            f"Step {remote.step} is here with the manifest {hash_file(held / MANIFEST_NAME)}, and "
            f"the pod has another one, {remote.sha256}: both are kept, `{held}` and `{kept}`"
        )
        hint = "Two trainers may have written this run: compare both before you resume from either"
        raise StateConflictError(message, hint=hint)

    def confirm(self, run_id: str, held: Sequence[HeldCheckpoint]) -> None:
        """Renew the receipts of checkpoints that were hashed before and have not changed since.

        Called last, so that no file of this pull can change them afterwards.
        """
        for one in held:
            path = self._folder.run.checkpoint(one.remote.step)
            if mark_of(path, one.remote) == one.mark or is_whole_at(path, one.remote):
                self._save_receipt(run_id, one.remote)
            else:
                message = f"`{path}` has changed during the pull"
                hint = f"See `nsa-ops backup verify {run_id}`"
                self.keep_failure(VerificationError(message, hint=hint))

    def _save_receipt(self, run_id: str, remote: RemoteCheckpoint) -> None:
        """Record that all hashes of a checkpoint agreed now, and when it first arrived.

        The receipt names the manifest whose hashes were compared, not the content of a file now.
        """
        path = self._folder.run.checkpoint(remote.step)
        now = self._operator.clock.unix_s()
        known = {one.path: one.pulled_unix_s for one in self._operator.store.receipts(run_id)}
        is_new = remote.step in self.pulled_steps
        receipt = Receipt(
            run_id=run_id,
            step=remote.step,
            path=str(path),
            total_bytes=remote.manifest.total_bytes,
            manifest_sha256=remote.sha256,
            pulled_unix_s=now if is_new else known.get(str(path), now),
            verified_unix_s=now,
        )
        self._operator.store.save_receipt(receipt)

    def keep_failure(self, error: OpsError) -> None:
        """Report an error now, and end the pull with it once everything else was brought."""
        self._operator.tell(error.message)
        self.failures.append(error)


def _forget(_file: RemoteFile) -> None:
    """Do not list a file of a checkpoint: it counts with its checkpoint."""


def _make_place(root: Path, name: str) -> Path:
    """The path of a file below a folder; its parent folders are made.

    Raises:
        VerificationError: If a link or a file is in the way, or the disk refuses the name.
    """
    try:
        return make_parents(root, name)
    except OSError as error:
        if error.errno not in _NAME_ERRORS:
            raise
        message = f"The file {show_name(name)} cannot have its name on this disk: {error.strerror}"
        raise VerificationError(message, hint="Name another folder with `--dest`") from error


def _free_name(wanted: Path, content: Path) -> Path:
    """An unused name, or that of a file with the same content."""
    path, taken = wanted, 0
    while path.is_symlink() or path.exists():
        if path.is_file() and content.is_file() and hash_file(path) == hash_file(content):
            return path
        taken += 1
        path = wanted.with_name(f"{wanted.name}_{taken}")
    return path


def _drop_strangers(pulling: Path, remote: RemoteCheckpoint) -> None:
    """Remove files of another checkpoint of this step, left by a pull that was cut."""
    wanted = {file.name for file in remote.manifest.files}
    for path in pulling.iterdir():
        if path.name not in wanted:
            path.unlink()
