"""The checkpoint that an attempt continues from, as rank 0 found it and all ranks know it."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.base import FrozenModel, one_line
from nsa_core.config.run import RunConfig
from nsa_core.data.batch import LoaderState
from nsa_core.rundir.checkpoint import Checkpoint, CheckpointManifest
from nsa_core.train.checkpoint_files import TrainingState
from nsa_core.train.failure import CheckpointError
from nsa_core.train.group import RankGroup


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint and its content beside tensors.

    Attributes:
        is_own: It is one of this run's own, not one of its parent's.
    """

    checkpoint: Checkpoint
    state: TrainingState
    config: RunConfig
    is_own: bool


def read_place(point: ResumePoint) -> LoaderState:
    """Where the run stood in its data.

    Raises:
        CheckpointError: If the checkpoint does not say it.
    """
    try:
        return LoaderState.model_validate(point.state.loader)
    except ValueError as error:
        message = f"{point.checkpoint.path.name} has no place in the data: {one_line(error)}"
        raise CheckpointError(message, hint="Resume from another checkpoint") from error


class _SharedPoint(FrozenModel):
    """A `ResumePoint` as it goes from rank 0 to the others; the path is one of its pod."""

    path: str
    manifest: CheckpointManifest
    state: TrainingState
    config: RunConfig
    is_own: bool


def share_point(group: RankGroup, found: ResumePoint | None) -> ResumePoint | None:
    """The checkpoint that rank 0 has found, on every rank."""
    if group.size == 1:
        return found
    own = b""
    if found is not None:
        own = _SharedPoint(
            path=str(found.checkpoint.path),
            manifest=found.checkpoint.manifest,
            state=found.state,
            config=found.config,
            is_own=found.is_own,
        ).model_dump_json().encode()  # fmt: skip
    text = group.from_first(own)
    if not text:
        return None
    point = _SharedPoint.model_validate_json(text)
    checkpoint = Checkpoint(Path(point.path), point.manifest)
    return ResumePoint(checkpoint, point.state, point.config, point.is_own)
