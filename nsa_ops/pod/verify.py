"""`python -m nsa_ops.pod.verify`: hash checkpoints where they are and say which are whole."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.checkpoint import (
    Checkpoint,
    find_damage,
    list_checkpoint_folders,
    open_checkpoint,
)
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import find_not_own
from nsa_core.rundir.manifest import ManifestError, read_manifest

MISSING = "does not exist"


class VerifiedCheckpoint(TolerantModel):
    """One checkpoint that was hashed.

    Attributes:
        path: Its folder.
        damage: What is wrong with it; empty if every hash agrees.
        run_id: Run that wrote it; empty if it has no manifest.
        attempt: Its attempt; 0 where that is not known.
        attempt_id: Identity of that attempt; empty where that is not known.
        step: Optimizer steps done.
        tokens_seen: Tokens consumed.
        total_bytes: Bytes of its files.
        created_unix_s: When it was written.
    """

    path: str
    damage: str = ""
    run_id: str = ""
    attempt: int = 0
    attempt_id: str = ""
    step: int = -1
    tokens_seen: int = 0
    total_bytes: int = 0
    created_unix_s: float = 0.0


class Verification(TolerantModel):
    """Answer of the agent, newest checkpoint first; it ends with the first whole one."""

    schema_version: int = 1
    checkpoints: list[VerifiedCheckpoint] = []

    @property
    def whole(self) -> VerifiedCheckpoint | None:
        """The newest whole checkpoint; None if there is none."""
        return next((found for found in self.checkpoints if not found.damage), None)

    @property
    def damaged(self) -> list[str]:
        """Those that are not whole, each in one line."""
        return [f"{Path(one.path).name}: {one.damage}" for one in self.checkpoints if one.damage]


def verify(checkpoint: Checkpoint) -> VerifiedCheckpoint:
    """Hash every file of a checkpoint."""
    manifest = checkpoint.manifest
    return VerifiedCheckpoint(
        path=str(checkpoint.path),
        damage=find_damage(checkpoint) or "",
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        attempt_id=manifest.attempt_id,
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        total_bytes=manifest.total_bytes,
        created_unix_s=manifest.created_unix_s,
    )


def verify_folder(path: Path) -> VerifiedCheckpoint:
    """Hash the checkpoint in a folder; one that is missing or not whole is said to be so."""
    if not path.is_dir():
        return VerifiedCheckpoint(path=str(path), damage=MISSING)
    checkpoint = open_checkpoint(path)
    if isinstance(checkpoint, str):
        return VerifiedCheckpoint(path=str(path), damage=checkpoint)
    return verify(checkpoint)


def verify_newest(run: RunDir) -> Iterator[VerifiedCheckpoint]:
    """Hash a run's checkpoints, newest first, up to the first whole one that it wrote itself."""
    try:
        manifest = read_manifest(run)
    except (ManifestError, OSError):
        manifest = None
    for folder in list_checkpoint_folders(run):
        found = verify_folder(folder)
        foreign = find_not_own(found, manifest) if manifest and not found.damage else None
        found = found.model_copy(update={"damage": foreign}) if foreign else found
        yield found
        if not found.damage:
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify one checkpoint folder or the newest of a run; the answer is JSON on stdout."""
    parser = argparse.ArgumentParser(prog="python -m nsa_ops.pod.verify", description=__doc__)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--checkpoint", type=Path, help="Folder of one checkpoint")
    wanted.add_argument("--run-dir", type=Path, help="Run whose newest whole checkpoint is sought")
    given = parser.parse_args(arguments)
    if given.checkpoint is not None:
        found = [verify_folder(given.checkpoint)]
    else:
        found = list(verify_newest(RunDir(given.run_dir)))
    sys.stdout.write(Verification(checkpoints=found).model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
