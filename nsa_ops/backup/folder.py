"""BackupFolder: what a backup is on this machine's disk, and a lock so that one command writes it.

A backup is a run directory like the pod's, plus `backup.json`: report, verify and the trainer
itself can be pointed at it.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import fsync_dir, write_text
from nsa_core.rundir.bounded_json import JsonLimits, parse_model, read_bounded
from nsa_core.rundir.checkpoint import CheckpointFile
from nsa_core.rundir.layout import RUN_ID, RunDir
from nsa_core.rundir.lineage import Lineage, lineage_of
from nsa_core.rundir.manifest import ManifestError, read_manifest
from nsa_core.rundir.names import path_fault, show_name
from nsa_ops.errors import LocalResourceError, StateConflictError
from nsa_ops.remote.inbound import Refusal, reserve, screen

RECORD_NAME = "backup.json"
PULLING_PREFIX = ".pulling_"
_GONE = ".gone"
#: Names at the top of a backup that no file of a run can have.
RESERVED = (RECORD_NAME, "checkpoints", _GONE)
_RECORD_LIMITS = JsonLimits(max_bytes=64 * 2**20, max_values=2_000_000)


class BackupRecord(TolerantModel):
    """Content of backup.json: what the last pull brought, apart from checkpoints.

    Attributes:
        source: Run directory on the pod.
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
        """The backup as a run directory."""
        return RunDir(self.root)

    @property
    def record(self) -> Path:
        """What the last pull brought."""
        return self.root / RECORD_NAME

    def pulling(self, step: int) -> Path:
        """Folder of a checkpoint that is not complete yet."""
        return self.run.checkpoints / f"{PULLING_PREFIX}{self.run.checkpoint(step).name}"

    @property
    def gone(self) -> Path:
        """Small files that an earlier pull brought and the pod has removed since."""
        return self.root / _GONE

    def aside(self, step: int, reason: str) -> Path:
        """An unused name for a checkpoint that another one of its step replaces."""
        name = f"{reason}_{self.run.checkpoint(step).name}"
        taken = 0
        while (path := self.run.checkpoints / (f"{name}_{taken}" if taken else name)).exists():
            taken += 1
        return path

    def conflicting(self, step: int, manifest_sha256: str) -> Path:
        """Folder of a second, different checkpoint of a step."""
        name = f"conflict_{self.run.checkpoint(step).name}_{manifest_sha256[:12]}"
        return self.run.checkpoints / name

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
            file = lock.open("a", encoding="utf-8")
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


@dataclass(frozen=True)
class ReadRecord:
    """What backup.json says.

    Attributes:
        record: The record with those files whose names, sizes and hashes follow the rules; None if
            there is none, or it cannot be read.
        refused: The rest, such as a name outside the backup.
    """

    record: BackupRecord | None
    refused: list[Refusal]


def read_record(folder: BackupFolder) -> ReadRecord:
    """What the last pull brought, and which entries of the record are refused."""
    fault = path_fault(folder.root, RECORD_NAME)
    if fault is not None:
        refused = [] if fault == "missing" else [Refusal(f"`{folder.record}`", f"is {fault}")]
        return ReadRecord(None, refused)
    try:
        content = read_bounded(folder.record, _RECORD_LIMITS.max_bytes)
        record = parse_model(BackupRecord, content, _RECORD_LIMITS)
    except ValueError:
        return ReadRecord(None, [Refusal(f"`{folder.record}`", "is no record of a backup")])
    if not RUN_ID.fullmatch(record.run_id):
        reason = f"names the run {show_name(record.run_id)}, and that is no run id"
        return ReadRecord(None, [Refusal(f"`{folder.record}`", reason)])
    files, refused = screen(record.files)
    files, ours = reserve(files, RESERVED)
    return ReadRecord(record.model_copy(update={"files": files}), [*refused, *ours])


def read_backup_record(folder: BackupFolder) -> BackupRecord | None:
    """The accepted part of the record; None if there is no readable record."""
    return read_record(folder).record


def write_backup_record(folder: BackupFolder, record: BackupRecord) -> None:
    """Replace backup.json."""
    write_text(folder.record, record.model_dump_json(indent=2) + "\n")


def move_aside(folder: BackupFolder, step: int, reason: str) -> Path:
    """Rename a checkpoint, so that another one can take its name."""
    target = folder.aside(step, reason)
    folder.run.checkpoint(step).replace(target)
    fsync_dir(folder.run.checkpoints)
    return target


def lineage_here(folder: BackupFolder) -> Lineage | None:
    """The attempts that a backup holds; None if it holds nothing that says so.

    A backup that an older version made has no lineage in its record; its manifest has the attempt.
    """
    record = read_backup_record(folder)
    if record is not None and record.lineage is not None:
        return record.lineage
    try:
        return lineage_of(read_manifest(folder.run))
    except (ManifestError, OSError):
        return None
