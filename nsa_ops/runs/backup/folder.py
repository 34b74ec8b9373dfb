"""BackupFolder: what a backup is on this machine's disk, and a lock so that one command writes it.

A backup is a run directory like the pod's, plus `backup.json`: report, verify and the trainer
itself can be pointed at it.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import fsync_dir, write_text
from nsa_core.rundir.checkpoint import CheckpointFile, CheckpointManifest
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import Lineage
from nsa_ops.errors import LocalResourceError, StateConflictError, VerificationError

RECORD_NAME = "backup.json"
PULLING_PREFIX = ".pulling_"


class BackupRecord(TolerantModel):
    """Content of backup.json: what the last pull brought, apart from checkpoints.

    Attributes:
        run_id: Run.
        pod: Pod it came from.
        source: Run directory there.
        pulled_unix_s: When.
        files: Small files with the size and hash they had on the pod.
        lineage: Attempts of the run up to the last pull; None in a record of an older version.
    """

    schema_version: int = 1
    run_id: str
    pod: str
    source: str
    pulled_unix_s: float
    files: list[CheckpointFile]
    lineage: Lineage | None = None


@dataclass(frozen=True)
class BackupFolder:
    """The paths of one backup."""

    root: Path

    @property
    def run(self) -> RunDir:
        """The backup as the run directory it is."""
        return RunDir(self.root)

    @property
    def record(self) -> Path:
        """What the last pull brought."""
        return self.root / RECORD_NAME

    def pulling(self, step: int) -> Path:
        """Where a checkpoint is collected until it is whole."""
        return self.run.checkpoints / f"{PULLING_PREFIX}{self.run.checkpoint(step).name}"

    @property
    def gone(self) -> Path:
        """Small files that an earlier pull brought and the pod does not have any more."""
        return self.root / ".gone"

    def aside(self, step: int, reason: str) -> Path:
        """A free name for a checkpoint that makes room for another one of its step."""
        name = f"{reason}_{self.run.checkpoint(step).name}"
        taken = 0
        while (path := self.run.checkpoints / (f"{name}_{taken}" if taken else name)).exists():
            taken += 1
        return path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, made if need be, for one command.

        Raises:
            StateConflictError: If another command holds it.
            LocalResourceError: If it cannot be made.
        """
        lock = self.root.with_name(f".{self.root.name}.lock")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = lock.open("a")
        except OSError as error:
            message = f"The backup folder `{self.root}` cannot be written: {error.strerror}"
            raise LocalResourceError(message, hint="Name another with `--dest`") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"Another command is writing the backup `{self.root}`"
                raise StateConflictError(message, hint="Wait for it, then try again") from error
            yield


def read_backup_record(folder: BackupFolder) -> BackupRecord | None:
    """What the last pull brought; None if there is no readable record."""
    try:
        return BackupRecord.model_validate_json(folder.record.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def write_backup_record(folder: BackupFolder, record: BackupRecord) -> None:
    """Replace backup.json."""
    write_text(folder.record, record.model_dump_json(indent=2) + "\n")


def check_file_names(manifest: CheckpointManifest) -> None:
    """Raise VerificationError if a manifest names a file outside its own folder."""
    for file in manifest.files:
        if file.name in {"", ".", ".."} or PurePosixPath(file.name).name != file.name:
            message = f"The checkpoint of step {manifest.step} names the file `{file.name}`"
            raise VerificationError(message, hint="Its checkpoint.json is damaged; do not use it")


def move_aside(folder: BackupFolder, step: int, reason: str) -> Path:
    """Rename a checkpoint out of the way; it stays on the disk."""
    target = folder.aside(step, reason)
    folder.run.checkpoint(step).replace(target)
    fsync_dir(folder.run.checkpoints)
    return target
