"""One pull under way: bring files and checkpoints, keep what failed, and what was brought."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import fsync_dir, write_bytes
from nsa_core.rundir.checkpoint import MANIFEST_NAME, hash_file
from nsa_core.rundir.names import show_name
from nsa_ops.backup.folder import BackupFolder, move_aside, read_backup_record
from nsa_ops.backup.held import Held, is_held_good, is_whole_at, is_whole_here, mark_of
from nsa_ops.backup.survey import RemoteCheckpoint, list_run_files
from nsa_ops.context import Operator, Work
from nsa_ops.errors import (
    DeadlineError,
    OpsError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.quantities import count_of, format_bytes
from nsa_ops.remote.files import is_here, pull_file
from nsa_ops.remote.inbound import Refusal, RemoteFile, make_parents, path_fault
from nsa_ops.remote.many_files import SMALL_BYTES, pull_small_files
from nsa_ops.remote.transport import Transport
from nsa_ops.store import Receipt

#: A live run rewrites small files (the watchdog's verdict every few seconds) while we read them.
ROUNDS = 3
_MAX_REFUSALS = 100
#: What a disk says to a name that it cannot have.
_NAME_ERRORS = frozenset({errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR})


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
        """Keep what the survey has refused as failures of this pull; a crowd of it is counted."""
        hint = "It is left alone; look at it on the pod"
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
        """Try each file once; what failed, by name. A lost link ends it all."""
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
        """Bring one file by itself; why it failed. A lost link ends it all."""
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
        """What the pod has no longer, such as the exit record of an earlier attempt, makes room.

        A name that was refused is not gone; what an earlier pull put away is never replaced.
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
            if is_whole_here(self._folder, remote):
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
        if is_held_good(final, run_id, self._operator.store.receipts(run_id)):
            self._keep_conflict(pulling, remote)
        self._collect(pulling, remote)
        if final.exists() or final.is_symlink():
            kept = move_aside(self._folder, remote.step, "damaged")
            self._operator.tell(f"what stood at step {remote.step} is kept as `{kept.name}`")
        pulling.rename(final)
        fsync_dir(final.parent)

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
        """Keep another checkpoint of a step that is held whole beside it, and say so.

        Raises:
            StateConflictError: Always; the one that is held stays as it is, with its receipt.
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
            f"Step {remote.step} is held here with the manifest {hash_file(held / MANIFEST_NAME)}, "
            f"and the pod has another one, {remote.sha256}: both are kept, `{held}` and `{kept}`"
        )
        hint = "Two trainers may have written this run: compare both before you resume from either"
        raise StateConflictError(message, hint=hint)

    def confirm(self, run_id: str, held: Sequence[Held]) -> None:
        """Renew receipts of checkpoints that were hashed before, if nothing of them has changed.

        Called after everything was brought: so no file of this pull can have changed them.
        """
        for one in held:
            path = self._folder.run.checkpoint(one.remote.step)
            if mark_of(path, one.remote) == one.mark or is_whole_here(self._folder, one.remote):
                self._save_receipt(run_id, one.remote)
            else:
                message = f"`{path}` has changed while the pull went on"
                hint = f"See `nsa-ops backup verify {run_id}`"
                self.keep_failure(VerificationError(message, hint=hint))

    def _save_receipt(self, run_id: str, remote: RemoteCheckpoint) -> None:
        """Write down that all hashes of a checkpoint agreed now; when it arrived is kept.

        The receipt names the manifest whose hashes were compared, and not what a file holds now.
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
        """Tell it, and let the pull end with it once everything else was brought."""
        self._operator.tell(error.message)
        self.failures.append(error)


def _forget(_file: RemoteFile) -> None:
    """A file of a checkpoint counts with its checkpoint."""


def _make_place(root: Path, name: str) -> Path:
    """The path of a file below a folder, with its parents.

    Raises:
        VerificationError: If a link or a file stands in the way, or the disk refuses the name.
    """
    try:
        return make_parents(root, name)
    except OSError as error:
        if error.errno not in _NAME_ERRORS:
            raise
        message = f"The file {show_name(name)} cannot be named on this disk: {error.strerror}"
        raise VerificationError(message, hint="Name another folder with `--dest`") from error


def _free_name(wanted: Path, content: Path) -> Path:
    """A name that nothing has yet, or that the same content has."""
    path, taken = wanted, 0
    while path.is_symlink() or path.exists():
        if path.is_file() and content.is_file() and hash_file(path) == hash_file(content):
            return path
        taken += 1
        path = wanted.with_name(f"{wanted.name}_{taken}")
    return path


def _drop_strangers(pulling: Path, remote: RemoteCheckpoint) -> None:
    """Files of another checkpoint of this step, left by a pull that was cut."""
    wanted = {file.name for file in remote.manifest.files}
    for path in pulling.iterdir():
        if path.name not in wanted:
            path.unlink()
