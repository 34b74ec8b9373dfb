"""Which receipts still stand for something: the checkpoint they tell of is there as it was."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from nsa_core.rundir.beginnings import Beginning, is_abandoned
from nsa_core.rundir.checkpoint import MANIFEST_NAME, hash_file, read_checkpoint
from nsa_ops.remote.inbound import path_fault
from nsa_ops.store import Receipt


def newest_held(receipts: Iterable[Receipt]) -> Receipt | None:
    """The receipt of the highest step that still holds; of equal steps the one verified last."""
    newest_first = sorted(receipts, key=lambda one: (one.step, one.verified_unix_s), reverse=True)
    return next(filter(is_held, newest_first), None)


def still_ahead(receipts: Iterable[Receipt], beginnings: Sequence[Beginning]) -> list[Receipt]:
    """Receipts without those of what a rollback or `resume --afresh` has abandoned since."""
    return [one for one in receipts if not _is_abandoned(one, beginnings)]


def _is_abandoned(receipt: Receipt, beginnings: Sequence[Beginning]) -> bool:
    behind = [one for one in beginnings if one.step < receipt.step]
    checkpoint = read_checkpoint(Path(receipt.path)) if behind else None
    return checkpoint is not None and is_abandoned(
        checkpoint.manifest.attempt, receipt.step, behind
    )


def is_held(receipt: Receipt) -> bool:
    """Whether the checkpoint has the manifest of its receipt, and every file its size.

    Only the manifest is hashed: a file that changed without changing its size is not seen here,
    and so whoever calls this a verified backup says since when (`verified_unix_s`).
    """
    path = Path(receipt.path)
    if path.is_symlink() or path_fault(path, MANIFEST_NAME) is not None:
        return False
    checkpoint = read_checkpoint(path)
    if checkpoint is None or checkpoint.manifest.fault is not None:
        return False
    if hash_file(path / MANIFEST_NAME) != receipt.manifest_sha256:
        return False
    files = checkpoint.manifest.files
    return all(
        path_fault(path, file.name) is None and (path / file.name).stat().st_size == file.size
        for file in files
    )
