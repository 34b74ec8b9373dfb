"""Lineages of one run id never meet in one backup: what is compared, and what is refused."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from nsa_core.rundir.lineage import Lineage, find_divergence, find_not_own, lineage_of
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.names import show_name
from nsa_ops.agents import parse_run_manifest
from nsa_ops.backup.folder import BackupFolder, read_backup_record
from nsa_ops.backup.survey import RemoteCheckpoint
from nsa_ops.context import PodLink
from nsa_ops.errors import StateConflictError, VerificationError
from nsa_ops.remote.inbound import Refusal
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.store import Receipt

_MAX_MANIFEST_BYTES = 4 * 2**20
_NO_MANIFEST = 3
_READ = f'[ -e "$1" ] || exit {_NO_MANIFEST}; head -c {_MAX_MANIFEST_BYTES} -- "$1"'


def read_manifest_there(link: PodLink, run_dir: PurePosixPath) -> RunManifest | None:
    """The manifest of a run on a pod; None if it has none.

    Raises:
        VerificationError: If it cannot be used, or is of another run than its folder says.
    """
    path = str(run_dir / "manifest.json")
    done = link.transport.run(("sh", "-c", _READ, "sh", path), timeout_s=QUICK_S)
    if done.exit_code == _NO_MANIFEST:
        return None
    manifest = parse_run_manifest(done.stdout, path)
    if manifest.run_id != run_dir.name:
        message = (
            f"`{path}` on pod `{link.record.name}` is of run `{manifest.run_id}`, not of "
            f"`{run_dir.name}`"
        )
        raise VerificationError(message, hint="Nothing was changed; look at it there")
    return manifest


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


def check_lineage(folder: BackupFolder, now: Lineage | None, pod: str) -> None:
    """Refuse to bring into a backup what does not go on from what it holds.

    Args:
        folder: The backup, which need not exist.
        now: Lineage of the run on the pod; None if the pod has no manifest of it.
        pod: Name of the pod.

    Raises:
        StateConflictError: If the pod's run is of another lineage.
        VerificationError: If the pod does not say of which lineage it is.
    """
    held = lineage_here(folder)
    if held is None:
        return
    if now is None:
        message = f"Pod `{pod}` has no manifest of `{held.run_id}`, and the backup has one"
        hint = "Nothing was changed, because nobody can tell whether it is the same run"
        raise VerificationError(message, hint=hint)
    why = find_divergence(held, now)
    if why is None:
        return
    record = read_backup_record(folder)
    source = f", brought from pod `{record.pod}`," if record else ""
    message = (
        f"The backup `{folder.root}`{source} and the run `{now.run_id}` on pod `{pod}` are two "
        f"lineages: {why}"
    )
    hint = (
        f"Nothing was changed. Keep both: `nsa-ops backup pull {now.run_id} --dest FOLDER` with "
        "another folder"
    )
    raise StateConflictError(message, hint=hint)


def split_foreign(
    checkpoints: Sequence[RemoteCheckpoint], run_id: str, manifest: RunManifest | None
) -> tuple[list[RemoteCheckpoint], list[Refusal]]:
    """The checkpoints that the run wrote itself, and why each of the others is refused."""
    own: list[RemoteCheckpoint] = []
    refused: list[Refusal] = []
    for one in checkpoints:
        why = _find_foreign(one, run_id, manifest)
        if why is None:
            own.append(one)
        else:
            name = f"the checkpoint {show_name(one.folder.name)}"
            refused.append(Refusal(name, f"is not brought: {why}"))
    return own, refused


def _find_foreign(one: RemoteCheckpoint, run_id: str, manifest: RunManifest | None) -> str | None:
    if manifest is not None:
        return find_not_own(one.manifest, manifest)
    if one.manifest.run_id == run_id:
        return None
    return f"it was written by run {one.manifest.run_id}, not by {run_id}"


def receipts_of(receipts: Sequence[Receipt], attempt: int, attempt_id: str) -> list[Receipt]:
    """Receipts of the lineage in which an attempt has this identity, and of unknown lineage.

    Args:
        receipts: Receipts of one run id.
        attempt: Number of the attempt.
        attempt_id: Its identity; empty where it is not known, and then every receipt counts.
    """
    if not attempt_id:
        return list(receipts)
    folders = {Path(one.path).parents[1] for one in receipts}
    lineages = {folder: lineage_here(BackupFolder(folder)) for folder in folders}
    return [
        one for one in receipts if _fits(lineages[Path(one.path).parents[1]], attempt, attempt_id)
    ]


def _fits(lineage: Lineage | None, attempt: int, attempt_id: str) -> bool:
    if lineage is None or lineage.attempt < attempt:
        return True
    return lineage.ids.get(attempt, "") == attempt_id
