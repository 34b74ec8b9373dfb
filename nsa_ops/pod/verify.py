"""`python -m nsa_ops.pod.verify`: hash checkpoints where they are and say which are whole."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.checkpoint import (
    CheckpointState,
    list_checkpoint_folders,
    verify_checkpoint,
)
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import find_not_own
from nsa_core.rundir.manifest import ManifestError, read_manifest


class HashedCheckpoints(TolerantModel):
    """Answer of the agent, newest checkpoint first; it ends with the first whole one."""

    schema_version: int = 1
    checkpoints: list[CheckpointState] = []

    @property
    def whole(self) -> CheckpointState | None:
        """The newest whole checkpoint; None if there is none."""
        return next((found for found in self.checkpoints if not found.damage), None)

    @property
    def damaged(self) -> list[str]:
        """Those that are not whole, each in one line."""
        return [f"{Path(one.path).name}: {one.damage}" for one in self.checkpoints if one.damage]


def verify_newest(run: RunDir) -> Iterator[CheckpointState]:
    """Hash a run's checkpoints, newest first, up to the first whole one that it wrote itself."""
    try:
        manifest = read_manifest(run)
    except (ManifestError, OSError):
        manifest = None
    for folder in list_checkpoint_folders(run):
        found = verify_checkpoint(folder)
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
        found = [verify_checkpoint(given.checkpoint)]
    else:
        found = list(verify_newest(RunDir(given.run_dir)))
    sys.stdout.write(HashedCheckpoints(checkpoints=found).model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
