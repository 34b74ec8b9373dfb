"""What a run directory on a pod holds that can be pulled, and of which lineage it is."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nsa_core.rundir.bounded_json import MANIFEST
from nsa_core.rundir.checkpoint import MANIFEST_NAME, CheckpointManifest, parse_manifest
from nsa_core.rundir.layout import CHECKPOINT_NAME, RunDir
from nsa_core.rundir.lineage import Lineage, find_divergence, find_not_own
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.names import show_name, show_number
from nsa_ops.agents import parse_run_manifest
from nsa_ops.backup.folder import RESERVED, BackupFolder, lineage_here, read_backup_record
from nsa_ops.context import PodLink
from nsa_ops.errors import ConfigurationError, NotFoundError, StateConflictError, VerificationError
from nsa_ops.remote.files import check_listed, list_files
from nsa_ops.remote.inbound import Listing, Refusal, RemoteFile, reserve
from nsa_ops.remote.transport import MAX_LISTING_BYTES, QUICK_S, Transport

_HERE = Path()
_MAX_STEP = 10**18
_STEP = re.compile(r"[0-9]{1,18}")
_MAX_MANIFEST_BYTES = 4 * 2**20
_NO_MANIFEST = 3
_READ = f'[ -e "$1" ] || exit {_NO_MANIFEST}; head -c {_MAX_MANIFEST_BYTES} -- "$1"'

# The manifest is the last file of a checkpoint: a folder without it is still being written. One
# that is a link, or behind one, is shown without content; a NUL, which no JSON has, would end it.
_MANIFESTS = f"""
cd -- "$1/checkpoints" 2>/dev/null || exit 0
for manifest in step_*/{MANIFEST_NAME}; do
  [ -e "$manifest" ] || [ -L "$manifest" ] || continue
  printf '%s\\0' "${{manifest%/*}}"
  if [ -f "$manifest" ] && [ ! -L "$manifest" ] && [ ! -L "${{manifest%/*}}" ]; then
    head -c {MANIFEST.max_bytes + 1} -- "$manifest" | tr '\\000' '\\001'
  fi
  printf '\\0'
done
"""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint on a pod as its manifest describes it; `content` is checkpoint.json in bytes."""

    folder: PurePosixPath
    content: bytes
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def sha256(self) -> str:
        """Hash of checkpoint.json, as a receipt names it."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class Survey:
    """What a run directory on a pod holds.

    Attributes:
        files: Everything outside checkpoints/ that may be brought.
        checkpoints: Whole checkpoints, newest first.
        refused: Names, manifests and answers of the pod that are not accepted.
        is_listed: The list of files could be read, so what is not in it does not exist.
    """

    files: list[RemoteFile]
    checkpoints: list[RemoteCheckpoint]
    refused: list[Refusal]
    is_listed: bool


def read_survey(transport: Transport, run_dir: PurePosixPath) -> Survey:
    """List a run directory in two round trips; a refused entry does not affect the others.

    Raises:
        NotFoundError: If it does not exist.
    """
    # Manifests first: a checkpoint that is finished in between is left for the next pull.
    checkpoints, refused = _read_manifests(transport, run_dir)
    try:
        listing = list_run_files(transport, run_dir)
    except VerificationError as error:
        refused.append(Refusal("the list of files", f"cannot be used: {error.message}"))
        return Survey([], checkpoints, refused, is_listed=False)
    return Survey(listing.files, checkpoints, [*refused, *listing.refused], is_listed=True)


def list_run_files(transport: Transport, run_dir: PurePosixPath) -> Listing:
    """Files of a run outside checkpoints/, without names that a backup uses itself.

    Raises:
        NotFoundError: If the run does not exist.
        VerificationError: If the answer is longer than any run's.
    """
    listing = list_files(transport, run_dir, without=("checkpoints",))
    files, ours = reserve(listing.files, RESERVED)
    return Listing(files, [*listing.refused, *ours])


def _read_manifests(
    transport: Transport, run_dir: PurePosixPath
) -> tuple[list[RemoteCheckpoint], list[Refusal]]:
    argv = ("sh", "-c", _MANIFESTS, "sh", str(run_dir))
    try:
        done = transport.run(argv, timeout_s=QUICK_S, max_bytes=MAX_LISTING_BYTES)
    except VerificationError as error:
        return [], [Refusal("the list of checkpoints", f"cannot be used: {error.message}")]
    check_listed(done, run_dir, transport)
    return parse_manifests(done.stdout, run_dir)


def parse_manifests(
    answer: bytes, run_dir: PurePosixPath
) -> tuple[list[RemoteCheckpoint], list[Refusal]]:
    """Checkpoints, newest first, and what is refused of the answer."""
    parts = answer.split(b"\0")
    found: dict[int, RemoteCheckpoint] = {}
    refused: list[Refusal] = []
    for raw_name, content in zip(parts[0::2], parts[1::2], strict=False):
        name = os.fsdecode(raw_name)
        judged = judge_checkpoint(name, content, run_dir)
        if isinstance(judged, str):
            refused.append(Refusal(f"the checkpoint {show_name(name)}", judged))
        elif found.setdefault(judged.step, judged).content != content:
            refused.append(Refusal(f"the checkpoint {show_name(name)}", "is listed twice"))
    return sorted(found.values(), key=lambda one: one.step, reverse=True), refused


def judge_checkpoint(name: str, content: bytes, run_dir: PurePosixPath) -> RemoteCheckpoint | str:
    """A checkpoint on a pod, or the reason why it is refused; decided here and nowhere else."""
    if CHECKPOINT_NAME.fullmatch(name) is None:
        return "has no name of a checkpoint, `step_` and its step"
    try:
        manifest = parse_manifest(content)
    except ValueError:
        return f"has no {MANIFEST_NAME} that can be read"
    if not 0 <= manifest.step <= _MAX_STEP or RunDir(_HERE).checkpoint(manifest.step).name != name:
        return f"has a {MANIFEST_NAME} of step {show_number(manifest.step)}"
    if manifest.run_id != run_dir.name:
        return f"is of the run {show_name(manifest.run_id)}, and not of `{run_dir.name}`"
    if manifest.fault is not None:
        return f"has a {MANIFEST_NAME} that {manifest.fault}"
    return RemoteCheckpoint(run_dir / "checkpoints" / name, content, manifest)


def choose_checkpoints(available: Sequence[RemoteCheckpoint], which: str) -> list[RemoteCheckpoint]:
    """The checkpoints that `--checkpoint latest|all|none|STEP` means.

    Raises:
        ConfigurationError: If it is none of these words and no step.
        NotFoundError: If there is no whole checkpoint of that step.
    """
    if which == "all":
        return list(available)
    if which == "latest":
        return list(available[:1])
    if which == "none":
        return []
    if not _STEP.fullmatch(which):
        message = f"`--checkpoint {which}` must be latest, all, none or a step"
        raise ConfigurationError(message, hint="See `nsa-ops backup pull --help`")
    chosen = [one for one in available if one.step == int(which)]
    if not chosen:
        steps = ", ".join(str(one.step) for one in available) or "none"
        message = f"The pod has no whole checkpoint of step {which}; it has: {steps}"
        raise NotFoundError(message, hint="Use one of them, or `--checkpoint latest`")
    return chosen


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
        raise VerificationError(message, hint="Nothing was changed; look at it on the pod")
    return manifest


def check_lineage(folder: BackupFolder, now: Lineage | None, pod: str) -> None:
    """Refuse to bring a run into a backup unless it continues the run that the backup has.

    Args:
        folder: The backup, which need not exist.
        now: Lineage of the run on the pod; None if the pod has no manifest of it.
        pod: Name of the pod.

    Raises:
        StateConflictError: If the pod's run is of another lineage.
        VerificationError: If the pod has no manifest that names its lineage.
    """
    held = lineage_here(folder)
    if held is None:
        return
    if now is None:
        message = f"Pod `{pod}` has no manifest of `{held.run_id}`, and the backup has one"
        hint = "Nothing was changed, because it may be another run of the same name"
        raise VerificationError(message, hint=hint)
    why = find_divergence(held, now)
    if why is None:
        return
    record = read_backup_record(folder)
    source = f", brought from pod `{record.pod}`," if record else ""
    message = (
        f"The backup `{folder.root}`{source} and the run `{now.run_id}` on pod `{pod}` are two "
        f"different runs: {why}"
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
