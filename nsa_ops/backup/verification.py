"""Hash a backup again and, if asked, open every file of it; which checkpoints are held whole."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_core.config.base import one_line
from nsa_core.rundir.bounded_json import read_json
from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointState,
    Flaw,
    inspect_checkpoint,
    inspect_file,
)
from nsa_core.rundir.checkpoint_shards import read_shards
from nsa_core.rundir.layout import CHECKPOINT_NAME
from nsa_core.rundir.lineage import Lineage, find_divergence, find_not_own, lineage_of
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.names import show_name
from nsa_ops.backup.folder import BackupFolder, BackupRecord, ReadRecord, read_record
from nsa_ops.backup.kept_aside import KeptAside, list_kept_aside
from nsa_ops.backup.safetensors import TensorFileError, read_tensor_entries
from nsa_ops.backup.survey import RemoteCheckpoint
from nsa_ops.errors import NotFoundError, VerificationError
from nsa_ops.store import Receipt, Store

#: Inode, size, and times of content and of status of each file: no writer can set the last one.
Mark = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Verification:
    """What hashing a backup again showed.

    Attributes:
        folder: The backup.
        steps: Steps of its whole checkpoints, newest first.
        num_files: Files that were hashed.
        num_tensors: Tensors that were found in their place; 0 if files were not opened.
        differences: Every file that is not as recorded.
        kept_aside: What pulls have kept aside; it is not hashed.
    """

    folder: Path
    steps: list[int]
    num_files: int
    num_tensors: int
    differences: list[Flaw]
    kept_aside: list[KeptAside] = field(default_factory=list)


def verify_backup(
    root: Path, *, load: bool = False, receipts: Sequence[Receipt] = ()
) -> Verification:
    """Hash everything in a backup, or in any run directory, and compare.

    Args:
        root: The folder.
        load: Also parse every tensor file and every JSON file.
        receipts: Receipts of the run; they bind each checkpoint.json to what was pulled.

    Raises:
        NotFoundError: If the folder holds neither a checkpoint nor a backup record.
    """
    folder = BackupFolder(root)
    checkpoints = _checkpoint_folders(folder)
    read = read_record(folder)
    if read == ReadRecord(None, []) and not checkpoints:
        message = f"`{root}` holds no backup: no {folder.record.name} and no checkpoint"
        raise NotFoundError(message, hint="See `nsa-ops backup ls`")
    small = read.record.files if read.record else []
    flaws = [Flaw(folder.record, "a usable record", f"not: {one.sentence}") for one in read.refused]
    checked = [inspect_file(root, one, with_hash=True, follow_links=False) for one in small]
    flaws += [flaw for flaw in checked if flaw is not None]
    manifest, parted = _read_lineage(folder, read.record)
    flaws += parted
    if folder.run.checkpoints.is_symlink():
        flaws.append(Flaw(folder.run.checkpoints, "a folder", "a link"))
        checkpoints = []
    run_id = read.record.run_id if read.record else ""
    steps, num_files, num_tensors = [], len(small), 0
    for path in checkpoints:
        state = inspect_checkpoint(path, follow_links=False)
        found = [*state.flaws, *_identity_flaws(path, state, run_id, receipts, manifest)]
        if state.manifest is not None and not found:
            num_files += len(state.manifest.files) + 1
            opened, found = _open_files(path, state) if load else (0, [])
            num_tensors += opened
            steps += [] if found else [state.step]
        flaws += found
    aside = list_kept_aside(folder)
    return Verification(root, steps, num_files, num_tensors, flaws, aside)


def check_verified(verification: Verification) -> None:
    """Raise VerificationError if there is a difference; it names the file and what was recorded."""
    if not verification.differences:
        return
    first, *others = verification.differences
    more = f" (and {len(others)} more)" if others else ""
    hint = (
        "Nothing was changed. `nsa-ops backup pull` brings a damaged checkpoint again and keeps "
        "the damaged one aside"
    )
    message = first.sentence + more
    raise VerificationError(message, hint=hint)


def renew_receipts(store: Store, verification: Verification, now_unix_s: float) -> None:
    """Note in the receipts of whole checkpoints that their hashes agreed now."""
    run = BackupFolder(verification.folder).run
    whole = {str(run.checkpoint(step)) for step in verification.steps}
    for receipt in store.receipts():
        if receipt.path in whole:
            store.save_receipt(replace(receipt, verified_unix_s=now_unix_s))


def _checkpoint_folders(folder: BackupFolder) -> list[Path]:
    """What is named as a checkpoint, highest step first, be it a folder or not."""
    if not folder.run.checkpoints.is_dir():
        return []
    found = [
        path for path in folder.run.checkpoints.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _read_lineage(
    folder: BackupFolder, record: BackupRecord | None
) -> tuple[RunManifest | None, list[Flaw]]:
    """The manifest that the checkpoints must fit, and where it parts from what was pulled."""
    try:
        manifest = read_manifest(folder.run)
    except ManifestError:
        return None, []  # a missing or changed one is a difference of its record
    if record is None:
        return manifest, []
    held = record.lineage or Lineage(run_id=record.run_id, attempt=0)
    why = find_divergence(held, lineage_of(manifest))
    if why is None:
        return manifest, []
    expected = "of the lineage that was pulled"
    return manifest, [Flaw(folder.run.manifest, expected, f"of another one: {why}")]


def _identity_flaws(
    path: Path,
    state: CheckpointState,
    run_id: str,
    receipts: Sequence[Receipt],
    manifest: RunManifest | None,
) -> list[Flaw]:
    """Why a checkpoint with a usable manifest is not the one that this backup should hold."""
    if state.manifest is None or state.manifest.fault is not None:
        return []
    place, flaws = path / MANIFEST_NAME, []
    if run_id not in {"", state.run_id}:
        found = f"of the run {show_name(state.run_id)}"
        return [Flaw(place, f"of the run `{run_id}`", found)]
    foreign = find_not_own(state, manifest) if manifest else None
    if foreign is not None:
        flaws.append(Flaw(place, f"a checkpoint of run {run_id}", f"not: {foreign}"))
    receipt = next((one for one in receipts if Path(one.path) == path), None)
    if receipt is not None and receipt.manifest_sha256 != state.manifest_sha256:
        expected = f"sha256 {receipt.manifest_sha256}, as its receipt says"
        flaws.append(Flaw(place, expected, f"sha256 {state.manifest_sha256}"))
    return flaws


def _open_files(path: Path, state: CheckpointState) -> tuple[int, list[Flaw]]:
    """Parse every tensor file and every JSON file of a checkpoint; how many tensors it has."""
    num_tensors = 0
    flaws = _shard_flaws(path, state)
    for file in state.manifest.files if state.manifest else []:
        place = path / file.name
        try:
            if place.suffix == ".safetensors":
                num_tensors += len(read_tensor_entries(place))
            elif place.suffix == ".json":
                read_json(place, is_nan_allowed=True)
        except TensorFileError as error:
            flaws.append(Flaw(place, "a whole tensor file", f"not: {error}"))
        except ValueError as error:
            flaws.append(Flaw(place, "JSON", f"not: {error}"))
    return num_tensors, flaws


def _shard_flaws(path: Path, state: CheckpointState) -> list[Flaw]:
    """Why the shards of a checkpoint are not one whole state."""
    if state.manifest is None or not state.manifest.num_shards:
        return []
    try:
        read_shards(path, state.manifest)
    except ValueError as error:
        found = f"not: {one_line(error)}"
        return [Flaw(path / MANIFEST_NAME, "of shards that make one whole state", found)]
    return []


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint of a pod that is here, whole when it was hashed; `mark` was taken before."""

    remote: RemoteCheckpoint
    mark: Mark


def find_held(folder: BackupFolder, remote: RemoteCheckpoint) -> HeldCheckpoint | None:
    """This very checkpoint if it is in the backup and all its hashes agree now."""
    path = folder.run.checkpoint(remote.step)
    mark = mark_of(path, remote)
    return HeldCheckpoint(remote, mark) if mark and is_whole_at(path, remote) else None


def mark_of(path: Path, remote: RemoteCheckpoint) -> Mark:
    """Inode, size and times of each file of a checkpoint; empty if one is missing."""
    names = [MANIFEST_NAME, *(file.name for file in remote.manifest.files)]
    try:
        facts = [os.lstat(path / name) for name in names]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in facts)


def is_whole_at(path: Path, remote: RemoteCheckpoint) -> bool:
    """Whether this very checkpoint is in a folder and all its hashes agree now."""
    for with_hashes in (False, True):  # sizes first: hashing takes minutes
        state = inspect_checkpoint(path, with_hashes=with_hashes, follow_links=False)
        if state.damage or state.manifest_sha256 != remote.sha256:
            return False
    return True


def is_held_good(path: Path, run_id: str, receipts: Iterable[Receipt]) -> bool:
    """Whether a folder holds a whole checkpoint of a run: the one of its receipt, if any."""
    state = inspect_checkpoint(path, follow_links=False)
    expected = {one.manifest_sha256 for one in receipts if one.path == str(path)}
    is_expected = not expected or state.manifest_sha256 in expected
    return not state.damage and state.run_id == run_id and is_expected
