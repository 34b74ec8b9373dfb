"""The checkpoint that an attempt continues from, as rank 0 found it and all ranks know it."""

from pathlib import Path

from nsa_core.config.base import FrozenModel, one_line
from nsa_core.config.run import RunConfig
from nsa_core.data.batch import LoaderState
from nsa_core.rundir.checkpoint import CheckpointManifest
from nsa_core.train.checkpoint_files import TrainingState
from nsa_core.train.failure import CheckpointError
from nsa_core.train.group import RankGroup


class ResumePoint(FrozenModel):
    """A verified checkpoint and its content beside tensors.

    Attributes:
        path: Its folder, on the pod of rank 0.
        is_own: It is one of this run's own, not one of its parent's.
    """

    path: Path
    manifest: CheckpointManifest
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
        message = f"{point.path.name} has no place in the data: {one_line(error)}"
        raise CheckpointError(message, hint="Resume from another checkpoint") from error


def share_point(group: RankGroup, found: ResumePoint | None) -> ResumePoint | None:
    """The checkpoint that rank 0 has found, on every rank."""
    if group.size == 1:
        return found
    text = group.from_first(found.model_dump_json().encode() if found is not None else b"")
    return ResumePoint.model_validate_json(text) if text else None
