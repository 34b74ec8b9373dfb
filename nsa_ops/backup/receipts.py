"""Which receipts are still true, and how much the loss of the pod would cost."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.checkpoint import inspect_checkpoint, read_checkpoint
from nsa_core.rundir.events import Beginning, is_abandoned, read_beginnings
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import Lineage
from nsa_ops.backup.folder import BackupFolder, lineage_here
from nsa_ops.quantities import count_of, format_duration, format_time
from nsa_ops.store import Receipt

#: More steps than any run has; a pod may report a number that no float holds.
_MOST_STEPS = 10**15


def newest_held(receipts: Iterable[Receipt]) -> Receipt | None:
    """The receipt of the highest step whose checkpoint is still there, newest first."""
    newest_first = sorted(receipts, key=lambda one: (one.step, one.verified_unix_s), reverse=True)
    return next(filter(is_held, newest_first), None)


def still_ahead(receipts: Iterable[Receipt], beginnings: Sequence[Beginning]) -> list[Receipt]:
    """Receipts of steps that no rollback or `resume --afresh` has abandoned since."""
    return [one for one in receipts if not is_left_behind(Path(one.path), one.step, beginnings)]


def steps_ahead(run: RunDir, steps: Sequence[int]) -> list[int]:
    """Of these checkpoints of a backup the ones that no later attempt has abandoned.

    All of them if it has abandoned all: it has saved nothing since.
    """
    beginnings = read_beginnings(run)
    kept = [one for one in steps if not is_left_behind(run.checkpoint(one), one, beginnings)]
    return kept or list(steps)


def newest_ahead(receipts: Sequence[Receipt]) -> Receipt | None:
    """As `newest_held`, of what no attempt that any of these backups knows has abandoned.

    Of all receipts if all are abandoned.
    """
    runs = {RunDir(Path(one.path).parent.parent) for one in receipts}
    beginnings = [one for run in runs for one in read_beginnings(run)]
    return newest_held(still_ahead(receipts, beginnings)) or newest_held(receipts)


def is_left_behind(path: Path, step: int, beginnings: Sequence[Beginning]) -> bool:
    """Whether one of these attempts went back behind the checkpoint of a folder."""
    behind = [one for one in beginnings if one.step < step]
    checkpoint = read_checkpoint(path) if behind else None
    return checkpoint is not None and is_abandoned(checkpoint.manifest.attempt, step, behind)


def is_held(receipt: Receipt) -> bool:
    """Whether the checkpoint has the manifest of its receipt, and every file its size.

    Only the manifest is hashed. A file that changed and kept its size goes unnoticed, so a message
    about the backup says when it was last verified (`verified_unix_s`).
    """
    state = inspect_checkpoint(Path(receipt.path), with_hashes=False, follow_links=False)
    return not state.damage and state.manifest_sha256 == receipt.manifest_sha256


def receipts_of(receipts: Sequence[Receipt], attempt: int, attempt_id: str) -> list[Receipt]:
    """Receipts of the lineage in which an attempt has this identity, and of unknown lineage.

    Args:
        receipts: Receipts of one run id.
        attempt: Number of the attempt.
        attempt_id: Its identity; empty where it is not known, and then every receipt counts.
    """
    if not attempt_id:
        return list(receipts)
    folders = {Path(one.path).parent.parent for one in receipts}
    lineages = {folder: lineage_here(BackupFolder(folder)) for folder in folders}
    return [
        one
        for one in receipts
        if _fits(lineages[Path(one.path).parent.parent], attempt, attempt_id)
    ]


def _fits(lineage: Lineage | None, attempt: int, attempt_id: str) -> bool:
    if lineage is None or lineage.attempt < attempt:
        return True
    return lineage.ids.get(attempt, "") == attempt_id


@dataclass(frozen=True)
class AtMostLost:
    """What the loss of a pod would cost.

    Attributes:
        steps: Optimizer steps that would have to be repeated.
        seconds: Training time they took; None if no step time is known.
        saved_step: Step of the newest verified backup; None without one.
        verified_unix_s: When all hashes of that backup last agreed; None without one.
    """

    steps: int
    seconds: float | None
    saved_step: int | None
    verified_unix_s: float | None

    @property
    def sentence(self) -> str:
        """`you lose at most …` in one line."""
        if self.saved_step is None and self.steps == 0:
            return "nothing is backed up, and no step is done yet"
        time = f" / {format_duration(self.seconds)}" if self.seconds is not None else ""
        if self.saved_step is None or self.verified_unix_s is None:
            return f"nothing is backed up: you lose all {count_of(self.steps, 'step')}{time}"
        when = format_time(self.verified_unix_s)
        where = f"the newest verified backup is step {self.saved_step:,}, verified at {when}"
        if self.steps == 0:
            return f"you lose nothing: {where}"
        return f"you lose at most {count_of(self.steps, 'step')}{time}: {where}"


def median_step_s(beats: Sequence[Heartbeat]) -> float | None:
    """Seconds of a step over the last progress records; None if none has a step time."""
    times = [beat.step_s for beat in beats if beat.step_s is not None]
    return statistics.median(times) if times else None


def at_most_lost(
    *, last_step: int, saved: Receipt | None, step_s: float | None = None
) -> AtMostLost:
    """What is lost if the pod disappears now.

    Args:
        last_step: Newest step that is known to be done.
        saved: Receipt of the newest backup that is still there; None without one.
        step_s: Seconds of one step, from the last heartbeats.
    """
    steps = max(0, last_step - (saved.step if saved else 0))
    return AtMostLost(
        steps=steps,
        seconds=None if step_s is None else min(steps, _MOST_STEPS) * step_s,
        saved_step=saved.step if saved else None,
        verified_unix_s=saved.verified_unix_s if saved else None,
    )
