"""How much would be lost if the pod were gone now; a pure function of what is safe."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.quantities import count_of, format_duration, format_time
from nsa_ops.store import Receipt

#: More steps than any run has; a pod may say a number that no float holds.
_MOST_STEPS = 10**15


@dataclass(frozen=True)
class AtMostLost:
    """What a gone pod would cost.

    Attributes:
        steps: Optimizer steps that would have to be done again.
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
    """Seconds of a step over the last progress records; None if none tells."""
    times = [beat.step_s for beat in beats if beat.step_s is not None]
    return statistics.median(times) if times else None


def at_most_lost(
    *, last_step: int, saved: Receipt | None, step_s: float | None = None
) -> AtMostLost:
    """What is lost if the pod is gone now.

    Args:
        last_step: Newest step that is known to be done.
        saved: Receipt of the newest backup that still holds; None without one.
        step_s: Seconds of one step, from the last heartbeats.
    """
    steps = max(0, last_step - (saved.step if saved else 0))
    return AtMostLost(
        steps=steps,
        seconds=None if step_s is None else min(steps, _MOST_STEPS) * step_s,
        saved_step=saved.step if saved else None,
        verified_unix_s=saved.verified_unix_s if saved else None,
    )
