"""Which checkpoints may go: neither the newest ones, nor every M-th, nor what somebody protects."""

from collections.abc import Collection, Sequence


def plan_removal(
    steps: Sequence[int], *, keep_last: int, keep_every: int, protected: Collection[int] = ()
) -> list[int]:
    """Steps of the checkpoints that may go, newest first; pure.

    Args:
        steps: Steps of all whole checkpoints, in any order.
        keep_last: Newest ones that are kept.
        keep_every: Every one at a multiple of this step is kept for good; 0 for none.
        protected: Steps that are kept whatever else holds.
    """
    ordered = sorted(steps, reverse=True)
    return [
        step
        for step in ordered[keep_last:]
        if step not in protected and not (keep_every and step % keep_every == 0)
    ]
