"""Hash a backup again and, if asked, open every file of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_core.rundir.bounded_json import read_json
from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    Checkpoint,
    CheckpointFile,
    hash_file,
    read_checkpoint,
)
from nsa_core.rundir.layout import CHECKPOINT_NAME
from nsa_core.rundir.lineage import Lineage, find_divergence, find_not_own, lineage_of
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.names import show_name, show_number
from nsa_ops.backup.folder import BackupFolder, BackupRecord, ReadRecord, read_record
from nsa_ops.backup.safetensors import TensorFileError, read_tensor_entries
from nsa_ops.errors import NotFoundError, VerificationError
from nsa_ops.remote.inbound import path_fault
from nsa_ops.store import Receipt, Store


@dataclass(frozen=True)
class Difference:
    """One file that is not what its record says.

    Attributes:
        path: The file.
        expected: What was recorded: a hash, a size, or words.
        found: What is there.
    """

    path: Path
    expected: str
    found: str

    @property
    def sentence(self) -> str:
        """The difference in one line."""
        return f"`{self.path}` should be {self.expected} and is {self.found}"


@dataclass(frozen=True)
class Verification:
    """What hashing a backup again showed.

    Attributes:
        folder: The backup.
        steps: Steps of its whole checkpoints, newest first.
        num_files: Files that were hashed.
        num_tensors: Tensors that were found in their place; 0 if files were not opened.
        differences: Every difference.
    """

    folder: Path
    steps: list[int]
    num_files: int
    num_tensors: int
    differences: list[Difference]


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
    differences = [
        Difference(folder.record, "a record that can be followed", f"not: {one.sentence}")
        for one in read.refused
    ]
    differences += _differences(root, small)
    run_id = read.record.run_id if read.record else ""
    steps, num_files, num_tensors = [], len(small), 0
    manifest, parted = _read_lineage(folder, read.record)
    differences += parted
    for path in checkpoints:
        found = list(_checkpoint_differences(root, path, run_id, receipts, manifest))
        checkpoint = None if found else read_checkpoint(path)
        if checkpoint is not None:
            num_files += len(checkpoint.manifest.files) + 1
            opened = open_files(checkpoint) if load else Opened(0, [])
            num_tensors += opened.num_tensors
            found = opened.differences
            steps += [] if found else [checkpoint.step]
        differences += found
    return Verification(root, steps, num_files, num_tensors, differences)


def check_verified(verification: Verification) -> None:
    """Raise VerificationError if there is a difference; it names the file and both hashes."""
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
    if not folder.run.checkpoints.is_dir():
        return []
    found = [
        path for path in folder.run.checkpoints.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _differences(root: Path, files: Sequence[CheckpointFile]) -> Iterator[Difference]:
    for file in files:
        path = root / file.name
        expected = f"sha256 {file.sha256} ({file.size} bytes)"
        fault = path_fault(root, file.name)
        if fault is not None:
            yield Difference(path, expected, fault)
            continue
        size, found = path.stat().st_size, hash_file(path)
        if (size, found) != (file.size, file.sha256):
            yield Difference(path, expected, f"sha256 {found} ({size} bytes)")


def _read_lineage(
    folder: BackupFolder, record: BackupRecord | None
) -> tuple[RunManifest | None, list[Difference]]:
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
    return manifest, [Difference(folder.run.manifest, expected, f"of another one: {why}")]


def _checkpoint_differences(
    root: Path,
    path: Path,
    run_id: str,
    receipts: Sequence[Receipt],
    manifest: RunManifest | None,
) -> Iterator[Difference]:
    manifest_path = path / MANIFEST_NAME
    fault = path_fault(root, f"checkpoints/{path.name}/{MANIFEST_NAME}")
    checkpoint = None if fault else read_checkpoint(path)
    if checkpoint is None:
        found = "missing or unreadable" if fault in {None, "missing"} else fault
        yield Difference(manifest_path, "a checkpoint's manifest", str(found))
        return
    misfit = _manifest_misfit(checkpoint, run_id)
    if misfit is not None:
        yield Difference(manifest_path, *misfit)
        return
    foreign = find_not_own(checkpoint.manifest, manifest) if manifest else None
    if foreign is not None:
        yield Difference(manifest_path, f"a checkpoint of run {run_id}", f"not: {foreign}")
    receipt = next((one for one in receipts if Path(one.path) == path), None)
    if receipt is not None:
        found = hash_file(manifest_path)
        if found != receipt.manifest_sha256:
            expected = f"sha256 {receipt.manifest_sha256}, as its receipt says"
            yield Difference(manifest_path, expected, f"sha256 {found}")
    yield from _differences(path, checkpoint.manifest.files)


def _manifest_misfit(checkpoint: Checkpoint, run_id: str) -> tuple[str, str] | None:
    """What a manifest should be and is; None if its folder, run and names are right."""
    manifest, folder = checkpoint.manifest, checkpoint.path
    if manifest.fault is not None:
        return "a list of the folder's own files", f"one that {manifest.fault}"
    if int(folder.name.removeprefix("step_")) != manifest.step:
        return f"of the step of `{folder.name}`", f"of step {show_number(manifest.step)}"
    if run_id not in {"", manifest.run_id}:
        return f"of the run `{run_id}`", f"of the run {show_name(manifest.run_id)}"
    return None


def checkpoint_damage(checkpoint: Checkpoint, *, is_named: bool = True) -> list[Difference]:
    """Every file of a checkpoint that is not what its manifest says.

    Args:
        checkpoint: Its folder and manifest.
        is_named: The folder has the name of its step.
    """
    misfit = _manifest_misfit(checkpoint, "") if is_named else None
    if misfit is not None:
        return [Difference(checkpoint.path / MANIFEST_NAME, *misfit)]
    return list(_differences(checkpoint.path, checkpoint.manifest.files))


@dataclass(frozen=True)
class Opened:
    """What opening the files of a checkpoint showed."""

    num_tensors: int
    differences: list[Difference]


def open_files(checkpoint: Checkpoint) -> Opened:
    """Parse every tensor file and every JSON file of a checkpoint."""
    num_tensors = 0
    differences = []
    for file in checkpoint.manifest.files:
        path = checkpoint.path / file.name
        try:
            if path.suffix == ".safetensors":
                num_tensors += len(read_tensor_entries(path))
            elif path.suffix == ".json":
                read_json(path, is_nan_allowed=True)
        except TensorFileError as error:
            differences.append(Difference(path, "a whole tensor file", f"not: {error}"))
        except ValueError as error:
            differences.append(Difference(path, "JSON", f"not: {error}"))
    return Opened(num_tensors, differences)
