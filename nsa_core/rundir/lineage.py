"""Lineage: the chain of attempts that a run consists of, and what belongs to it; pure.

A run id is a name, and two machines can use one name. Each attempt therefore has a random
identity, and the manifest of an attempt holds those of all earlier ones. Files that were written
before attempts had an identity are of unknown lineage: they belong to a run as long as nothing
contradicts. An attempt that has an identity writes it into each checkpoint, so that one without
any is not of it.
"""

from typing import Protocol

from nsa_core.config.base import FrozenModel
from nsa_core.rundir.manifest import AttemptId, RunManifest

#: Digits of an identity that a message shows; enough to distinguish two.
_SHOWN = 12


class Lineage(FrozenModel):
    """The attempts of a run up to one of them.

    Attributes:
        run_id: Run.
        attempt: The last attempt.
        ids: Identity of each attempt by its number; one without an identity is absent.
    """

    run_id: str
    attempt: int
    ids: dict[int, AttemptId] = {}


class SignedCheckpoint(Protocol):
    """What a checkpoint says about who wrote it."""

    @property
    def run_id(self) -> str:
        """Run that wrote it."""

    @property
    def attempt(self) -> int:
        """Its attempt; 0 where that is not known."""

    @property
    def attempt_id(self) -> str:
        """Identity of that attempt; empty where that is not known."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""


def lineage_of(manifest: RunManifest) -> Lineage:
    """The attempts of a run, as the manifest of its current attempt names them."""
    earlier = {k: one for k, one in manifest.earlier_attempts.items() if 0 < k < manifest.attempt}
    ids = {k: one for k, one in (earlier | {manifest.attempt: manifest.attempt_id}).items() if one}
    return Lineage(run_id=manifest.run_id, attempt=manifest.attempt, ids=ids)


def find_foreign(checkpoint: SignedCheckpoint, manifest: RunManifest) -> str | None:
    """Why a checkpoint is not of this run or of the parent that it began from; None if it is.

    Args:
        checkpoint: What it says about itself.
        manifest: Manifest of the run that would use it.
    """
    if checkpoint.run_id != manifest.run_id:
        return _find_other_parent(checkpoint, manifest)
    return _find_other_attempt(checkpoint, lineage_of(manifest))


def find_not_own(checkpoint: SignedCheckpoint, manifest: RunManifest) -> str | None:
    """Why a checkpoint was not written by this run itself; None if it was."""
    if checkpoint.run_id != manifest.run_id:
        return f"it was written by run {checkpoint.run_id}, not by {manifest.run_id}"
    return _find_other_attempt(checkpoint, lineage_of(manifest))


def _find_other_parent(checkpoint: SignedCheckpoint, manifest: RunManifest) -> str | None:
    parent = manifest.parent
    if parent is None or parent.run_id != checkpoint.run_id:
        named = f", whose parent is {parent.run_id}" if parent else ""
        return f"it was written by run {checkpoint.run_id}, not by {manifest.run_id}{named}"
    if parent.step != checkpoint.step:
        return f"it is step {checkpoint.step} of {parent.run_id}, and the parent is {parent.step}"
    if parent.attempt_id and checkpoint.attempt_id != parent.attempt_id:
        found = checkpoint.attempt_id[:_SHOWN] or "unknown"
        ids = f"{found}, and the parent's is {parent.attempt_id[:_SHOWN]}"
        return f"it is of another lineage of {parent.run_id}: its attempt is {ids}"
    return None


def _find_other_attempt(checkpoint: SignedCheckpoint, lineage: Lineage) -> str | None:
    attempt, found = checkpoint.attempt, checkpoint.attempt_id
    if not 0 <= attempt <= lineage.attempt:
        return f"it was written by attempt {attempt}, and {lineage.run_id} is at {lineage.attempt}"
    if found == lineage.ids.get(attempt, "") and (attempt or not _is_known(lineage)):
        return None
    known = lineage.ids.get(attempt, "")[:_SHOWN] or "none"
    return (
        f"it is of another lineage of {lineage.run_id}: its attempt {attempt or 'unknown'} is "
        f"{found[:_SHOWN] or 'unknown'}, and this run's is {known}"
    )


def _is_known(lineage: Lineage) -> bool:
    """Whether every attempt has an identity, so that none can have written a file without one."""
    return all(attempt in lineage.ids for attempt in range(1, lineage.attempt + 1))


def find_divergence(held: Lineage, now: Lineage) -> str | None:
    """Why `now` does not continue `held`; None if it is the same chain, or the same and longer.

    An identity is given when an attempt begins and never later: an attempt that has one in only
    one of the two chains is not the same attempt.
    """
    if held.run_id != now.run_id:
        return f"one is of run {held.run_id} and the other of {now.run_id}"
    for attempt in sorted(held.ids.keys() | now.ids.keys()):
        one, other = held.ids.get(attempt, ""), now.ids.get(attempt, "")
        if one != other and attempt <= min(held.attempt, now.attempt):
            shown = f"{one[:_SHOWN] or 'unknown'} in one and {other[:_SHOWN] or 'unknown'}"
            return f"attempt {attempt} is {shown} in the other"
    if now.attempt < held.attempt:
        return f"one has gone on to attempt {held.attempt} and the other is at {now.attempt}"
    return None
