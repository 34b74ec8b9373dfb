"""Checkpoints on a pod: a named one must exist and be whole before anything begins from it."""

from nsa_core.rundir.manifest import Parent, RunManifest
from nsa_ops.errors import NotFoundError, VerificationError
from nsa_ops.pod.verify import MISSING, VerifiedCheckpoint
from nsa_ops.runs.agents import verify
from nsa_ops.runs.context import PodLink


def require_checkpoint(link: PodLink, code_id: str, path: str) -> VerifiedCheckpoint:
    """A whole checkpoint on the pod, every hash checked.

    Args:
        link: Pod.
        code_id: Version of the code whose agent looks.
        path: Its folder; a relative one is below the pod's root.

    Raises:
        NotFoundError: If it does not exist.
        VerificationError: If it is not whole.
    """
    folder = str(link.root / path)
    found = verify(link, code_id, checkpoint=folder).checkpoints[0]
    if found.damage == MISSING:
        message = f"Checkpoint `{folder}` does not exist on pod `{link.record.name}`"
        raise NotFoundError(message, hint="See what is there with `nsa-ops run show RUN`")
    if found.damage:
        message = f"Checkpoint `{folder}` cannot be used: {found.damage}"
        raise VerificationError(message, hint="Leave the path out to use the newest whole one")
    return found


def with_parent(link: PodLink, manifest: RunManifest) -> RunManifest:
    """Verify the checkpoint to begin from, and name its run as the parent.

    Raises:
        NotFoundError: If it is missing or damaged.
    """
    if manifest.resume == "auto":
        return manifest
    checkpoint = require_checkpoint(link, manifest.code_id, manifest.resume)
    parent = Parent(run_id=checkpoint.run_id, step=checkpoint.step)
    return manifest.model_copy(update={"parent": parent, "resume": checkpoint.path})
