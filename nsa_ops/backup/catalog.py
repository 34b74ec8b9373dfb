"""Which backups are on this machine, without hashing them."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_ops.backup.folder import BackupFolder, read_backup_record
from nsa_ops.backup.locate import known_backups
from nsa_ops.context import Operator


@dataclass(frozen=True)
class BackupEntry:
    """One backup as `backup ls` shows it.

    Attributes:
        run_id: Run.
        folder: Where it is.
        pod: Pod it came from; empty if no pull was finished.
        steps: Steps of its checkpoints, newest first; `verify` says whether they are good.
        total_bytes: Size of those checkpoints.
        pulled_unix_s: When the last pull ended; None if none did.
        verified_unix_s: When the newest checkpoint's hashes last agreed; None without a receipt.
    """

    run_id: str
    folder: Path
    pod: str
    steps: list[int]
    total_bytes: int
    pulled_unix_s: float | None
    verified_unix_s: float | None


def list_backups(operator: Operator) -> list[BackupEntry]:
    """All backups that this laptop knows of."""
    return [_entry(operator, folder) for folder in known_backups(operator)]


def _entry(operator: Operator, folder: BackupFolder) -> BackupEntry:
    checkpoints = list_checkpoints(folder.run)
    record = read_backup_record(folder)
    run_id = record.run_id if record else folder.root.name
    verified = {one.path: one.verified_unix_s for one in operator.store.receipts(run_id)}
    return BackupEntry(
        run_id=run_id,
        folder=folder.root,
        pod=record.pod if record else "",
        steps=[one.step for one in checkpoints],
        total_bytes=sum(one.manifest.total_bytes for one in checkpoints),
        pulled_unix_s=record.pulled_unix_s if record else None,
        verified_unix_s=verified.get(str(checkpoints[0].path)) if checkpoints else None,
    )
