"""What a run directory on a pod holds that can be pulled, and which checkpoints are wanted."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pydantic import ValidationError

from nsa_core.rundir.checkpoint import MANIFEST_NAME, CheckpointManifest
from nsa_core.rundir.layout import CHECKPOINT_NAME
from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.remote.files import RemoteFile, check_listed, list_files
from nsa_ops.remote.transport import QUICK_S, Transport
from nsa_ops.runs.backup.folder import check_file_names

#: The manifest is the last file of a checkpoint: a folder without it is still being written.
_MANIFESTS = f"""
cd -- "$1/checkpoints" 2>/dev/null || exit 0
for manifest in step_*/{MANIFEST_NAME}; do
  [ -f "$manifest" ] || continue
  printf '%s\\0' "${{manifest%/*}}"; cat -- "$manifest"; printf '\\0'
done
"""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint on a pod, as its manifest describes it.

    Attributes:
        folder: Absolute folder there.
        content: Bytes of checkpoint.json.
        manifest: The same, parsed.
    """

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
        files: Everything outside checkpoints/.
        checkpoints: Whole checkpoints, newest first.
        unreadable: Folders whose manifest cannot be parsed.
    """

    files: list[RemoteFile]
    checkpoints: list[RemoteCheckpoint]
    unreadable: list[str]


def read_survey(transport: Transport, run_dir: PurePosixPath) -> Survey:
    """List a run directory in two round trips.

    Raises:
        NotFoundError: If it does not exist.
    """
    # Manifests first: a checkpoint that is finished in between is left for the next pull.
    done = transport.run(("sh", "-c", _MANIFESTS, "sh", str(run_dir)), timeout_s=QUICK_S)
    check_listed(done, run_dir, transport)
    checkpoints, unreadable = parse_manifests(done.stdout, run_dir)
    files = list_files(transport, run_dir, without=("checkpoints",))
    return Survey(files, checkpoints, unreadable)


def parse_manifests(
    answer: bytes, run_dir: PurePosixPath
) -> tuple[list[RemoteCheckpoint], list[str]]:
    """Checkpoints, newest first, and folders that hold no proper manifest."""
    parts = answer.split(b"\0")
    found: list[RemoteCheckpoint] = []
    unreadable: list[str] = []
    for raw_name, content in zip(parts[0::2], parts[1::2], strict=False):
        name = os.fsdecode(raw_name)
        step = CHECKPOINT_NAME.fullmatch(name)
        try:
            manifest = CheckpointManifest.model_validate_json(content)
        except ValidationError:
            unreadable.append(name)
            continue
        if step is None or int(step[1]) != manifest.step:
            unreadable.append(name)
            continue
        check_file_names(manifest)
        found.append(RemoteCheckpoint(run_dir / "checkpoints" / name, content, manifest))
    return sorted(found, key=lambda one: one.step, reverse=True), unreadable


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
    if not which.isdigit():
        message = f"`--checkpoint {which}` must be latest, all, none or a step"
        raise ConfigurationError(message, hint="See `nsa-ops backup pull --help`")
    chosen = [one for one in available if one.step == int(which)]
    if not chosen:
        steps = ", ".join(str(one.step) for one in available) or "none"
        message = f"The pod has no whole checkpoint of step {which}; it has: {steps}"
        raise NotFoundError(message, hint="Use one of them, or `--checkpoint latest`")
    return chosen
