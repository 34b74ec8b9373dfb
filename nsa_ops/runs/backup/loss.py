"""How much would be lost if the pod were gone now; a pure function of what is safe."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.quantities import format_duration
from nsa_ops.store import Receipt


@dataclass(frozen=True)
class AtMostLost:
    """What a gone pod would cost.

    Attributes:
        steps: Optimizer steps that would have to be done again.
        seconds: Training time they took; None if no step time is known.
        saved_step: Step of the newest verified backup; None without one.
    """

    steps: int
    seconds: float | None
    saved_step: int | None

    @property
    def sentence(self) -> str:
        """`you lose at most …` in one line."""
        if self.saved_step is None and self.steps == 0:
            return "nothing is backed up, and no step is done yet"
        time = f" / {format_duration(self.seconds)}" if self.seconds is not None else ""
        if self.saved_step is None:
            return f"nothing is backed up: you lose all {self.steps:,} steps{time}"
        where = f"the newest verified backup is step {self.saved_step:,}"
        if self.steps == 0:
            return f"you lose nothing: {where}"
        return f"you lose at most {self.steps:,} steps{time}: {where}"


def newest_backup_step(receipts: Sequence[Receipt]) -> int | None:
    """Step of the newest verified backup; None without a receipt."""
    return max((receipt.step for receipt in receipts), default=None)


def median_step_s(beats: Sequence[Heartbeat]) -> float | None:
    """Seconds of a step over the last progress records; None if none tells."""
    times = [beat.step_s for beat in beats if beat.step_s is not None]
    return statistics.median(times) if times else None


def at_most_lost(
    *, last_step: int, saved_step: int | None, step_s: float | None = None
) -> AtMostLost:
    """What is lost if the pod is gone now.

    Args:
        last_step: Newest step that is known to be done.
        saved_step: Step of the newest verified backup.
        step_s: Seconds of one step, from the last heartbeats.
    """
    steps = max(0, last_step - (saved_step or 0))
    return AtMostLost(steps, None if step_s is None else steps * step_s, saved_step)
