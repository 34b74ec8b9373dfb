"""Which steps may change the weights, and when a run has had too many that may not; pure."""

import math
from collections.abc import Sequence

WINDOW_STEPS = 100


def find_fault(loss: float, grad_norm: float, num_valid: int) -> str | None:
    """Why a step must be skipped: its loss or gradient is missing, not finite or exactly 0.

    Args:
        loss: Mean loss over the valid tokens in nats.
        grad_norm: Norm that clipping returned.
        num_valid: Valid target tokens of the step on all ranks.
    """
    if num_valid == 0:
        return "the loss is missing: the batch has no valid target"
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if value == 0.0:
            return f"the {name} is exactly 0"
    return None


def recent(unusable_steps: Sequence[int], step: int) -> list[int]:
    """The skipped steps among the last `WINDOW_STEPS`."""
    return [skipped for skipped in unusable_steps if step - skipped < WINDOW_STEPS]


def find_breach(
    unusable_steps: Sequence[int], step: int, *, in_row: int, in_100: int
) -> str | None:
    """Why the run must end after this step, or None: too many in a row or in a hundred.

    Args:
        unusable_steps: Steps that were skipped, ascending; `step` may be the last.
        step: The step just tried.
        in_row: How many in a row end the run.
        in_100: How many in 100 steps end the run.
    """
    skipped = set(unusable_steps)
    if all(step - back in skipped for back in range(in_row)):
        return f"{in_row} steps in a row had no usable loss or gradient"
    if step in skipped and len(recent(unusable_steps, step)) >= in_100:
        return f"{in_100} of {WINDOW_STEPS} steps had no usable loss or gradient"
    return None
