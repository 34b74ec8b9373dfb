"""One pull under way: bring files and checkpoints, keep what failed, and what was brought."""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from nsa_core.rundir.atomic import fsync_dir, write_bytes
from nsa_core.rundir.checkpoint import MANIFEST_NAME, hash_file, read_checkpoint
from nsa_ops.errors import DeadlineError, OpsError, PartialError, PodUnreachableError
from nsa_ops.quantities import format_bytes
from nsa_ops.remote.files import RemoteFile, list_files, pull_file
from nsa_ops.remote.transport import Transport
from nsa_ops.runs.backup.folder import BackupFolder, move_aside, read_backup_record
from nsa_ops.runs.backup.survey import RemoteCheckpoint
from nsa_ops.runs.backup.verify import checkpoint_damage
from nsa_ops.runs.context import Operator
from nsa_ops.store import Receipt

#: A live run rewrites small files (the watchdog's verdict every few seconds) while we read them.
ROUNDS = 3


def is_whole_here(folder: BackupFolder, remote: RemoteCheckpoint) -> bool:
    """Whether this very checkpoint is in the backup and all its hashes agree now."""
    path = folder.run.checkpoint(remote.step)
    local = read_checkpoint(path)
    if local is None or (path / MANIFEST_NAME).read_bytes() != remote.content:
        return False
    return not checkpoint_damage(local)


class Transfer:
    """Brings the files of one run into one backup; the caller holds the folder's lock."""

    def __init__(
        self, operator: Operator, transport: Transport, source: PurePosixPath, folder: BackupFolder
    ) -> None:
        self._operator = operator
        self._transport = transport
        self._source = source
        self._folder = folder
        self._failures: list[OpsError] = []
        self.brought: list[RemoteFile] = []
        self.pulled_steps: list[int] = []
        self.num_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _bring(self, source: PurePosixPath, target: Path, size: int, sha256: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        pull_file(self._transport, source, target, size=size, sha256=sha256, on_bytes=self._count)

    def bring_files(self, files: Sequence[RemoteFile]) -> None:
        """Small files; one that was rewritten meanwhile is looked at again and brought then."""
        failures = self._bring_round(files)
        for _ in range(ROUNDS - 1):
            if not failures:
                return
            now = list_files(self._transport, self._source, without=("checkpoints",))
            failures = self._bring_round([file for file in now if file.name in failures])
        for error in failures.values():
            self.keep_failure(error)

    def _bring_round(self, files: Iterable[RemoteFile]) -> dict[str, OpsError]:
        """Try each file once; what failed, by name. A lost link ends it all."""
        failures = {}
        for file in files:
            target = self._folder.root / file.name
            try:
                self._bring(self._source / file.name, target, file.size, file.sha256)
            except (PodUnreachableError, DeadlineError):
                raise
            except OpsError as error:
                failures[file.name] = error
                continue
            self.brought.append(file)
        return failures

    def put_away_gone(self, there: Sequence[RemoteFile]) -> None:
        """What the pod has no longer, such as the exit record of an earlier attempt, makes room."""
        before = read_backup_record(self._folder)
        names = {file.name for file in there}
        for file in before.files if before else []:
            path = self._folder.root / file.name
            if file.name not in names and path.is_file():
                kept = self._folder.gone / file.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                path.replace(kept)

    def bring_checkpoints(self, run_id: str, remotes: Sequence[RemoteCheckpoint]) -> None:
        """Checkpoints that are not here, each with a receipt as soon as it is whole."""
        for remote in remotes:
            if is_whole_here(self._folder, remote):
                continue
            size = format_bytes(remote.manifest.total_bytes)
            self._operator.tell(f"checkpoint of step {remote.step}: {size}")
            try:
                self._bring_checkpoint(remote)
            except (PodUnreachableError, DeadlineError):
                raise
            except OpsError as error:
                self.keep_failure(error)
                continue
            self.pulled_steps.append(remote.step)
            self.save_receipt(run_id, remote)

    def _bring_checkpoint(self, remote: RemoteCheckpoint) -> None:
        """Collect beside the final name, manifest last, then rename the folder."""
        pulling = self._folder.pulling(remote.step)
        pulling.mkdir(parents=True, exist_ok=True)
        (pulling / MANIFEST_NAME).unlink(missing_ok=True)
        for file in remote.manifest.files:
            self._bring(remote.folder / file.name, pulling / file.name, file.size, file.sha256)
        _drop_strangers(pulling, remote)
        write_bytes(pulling / MANIFEST_NAME, remote.content)
        final = self._folder.run.checkpoint(remote.step)
        if final.exists():
            self._make_room(final, remote.step)
        pulling.rename(final)
        fsync_dir(final.parent)

    def _make_room(self, final: Path, step: int) -> None:
        """What stands at the final name is other content or damaged: keep it under another name."""
        local = read_checkpoint(final)
        is_good = local is not None and not checkpoint_damage(local)
        kept = move_aside(self._folder, step, "replaced" if is_good else "damaged")
        self._operator.tell(f"what stood at step {step} is kept as `{kept.name}`")

    def save_receipt(self, run_id: str, remote: RemoteCheckpoint) -> None:
        """Write down that all hashes of a checkpoint agreed now; when it arrived is kept."""
        path = self._folder.run.checkpoint(remote.step)
        now = self._operator.clock.unix_s()
        known = {one.path: one.pulled_unix_s for one in self._operator.store.receipts(run_id)}
        is_new = remote.step in self.pulled_steps
        receipt = Receipt(
            run_id=run_id,
            step=remote.step,
            path=str(path),
            total_bytes=remote.manifest.total_bytes,
            manifest_sha256=hash_file(path / MANIFEST_NAME),
            pulled_unix_s=now if is_new else known.get(str(path), now),
            verified_unix_s=now,
        )
        self._operator.store.save_receipt(receipt)

    def keep_failure(self, error: OpsError) -> None:
        """Say what could not be brought, and go on with the rest."""
        self._operator.tell(error.message)
        self._failures.append(error)

    def check_nothing_failed(self) -> None:
        """Raise the only failure as it is, or PartialError where other things were brought."""
        if len(self._failures) == 1 and not self.brought and not self.pulled_steps:
            raise self._failures[0]
        if self._failures:
            count = len(self._failures)
            message = f"{count} of the pod's files were not brought: {self._failures[0].message}"
            hint = self._failures[0].hint or "They changed while they were read; pull again"
            raise PartialError(message, hint=hint) from self._failures[0]


def _drop_strangers(pulling: Path, remote: RemoteCheckpoint) -> None:
    """Files of another checkpoint of this step, left by a pull that was cut."""
    wanted = {file.name for file in remote.manifest.files}
    for path in pulling.iterdir():
        if path.name not in wanted:
            path.unlink()
