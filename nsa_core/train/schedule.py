"""The learning rate as a pure function of the optimizer step."""

import math

from nsa_core.config.training import ScheduleConfig


def learning_rate_scale(step: int, schedule: ScheduleConfig) -> float:
    """Learning rate of an optimizer step as a share of the peak.

    Warm-up reaches 1 at the step `warmup_steps - 1`; the last step of the run, `steps - 1`, has
    exactly `min_ratio` (`constant` excepted).

    Args:
        step: Optimizer steps done before this one; never micro-steps.
        schedule: Kind and lengths.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    last = schedule.steps - 1
    first = schedule.warmup_steps
    if schedule.kind == "wsd":
        first = max(first, schedule.steps - round(schedule.steps * schedule.decay_fraction) - 1)
    progress = min(1.0, max(0.0, (step - first) / max(1, last - first)))
    falling = 1 - progress if schedule.kind == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.min_ratio + (1 - schedule.min_ratio) * falling
