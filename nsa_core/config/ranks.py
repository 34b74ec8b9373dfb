"""How many cards of a pod a run takes, and how the rows of a step are shared by its ranks; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa_core.config.profile import HardwareProfile

_CARDS, _PODS, _PROCESSES = "runtime.num_gpus", "runtime.num_pods", "runtime.cpu_ranks"
_ROWS, _ACCUMULATION = "batch.micro_batch", "batch.accumulation"
#: Values that stay as they are where the operator names one of them.
BATCH_KEYS = frozenset({_ROWS, _ACCUMULATION})


@dataclass(frozen=True)
class OfferedCards:
    """Cards that each pod of a run can give it.

    Attributes:
        count: Of the pod that has the fewest.
        why: What the pod has, for the note of a plan: `the pod has 8, and gpu3 is in use`.
    """

    count: int
    why: str


@dataclass(frozen=True)
class SharedRows:
    """What became of the values that depend on the number of ranks.

    Attributes:
        values: Values that differ from those that were given, by dotted key.
        notes: One line for each of them.
    """

    values: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def share_rows(micro_batch: int, accumulation: int, ranks: int) -> tuple[int, int] | None:
    """The same rows of a step for this many ranks, in the largest micro-batch that divides them.

    Args:
        micro_batch: Rows that a rank computes at once, at most.
        accumulation: Micro-batches of a step in all.
        ranks: That share them.

    Returns:
        Micro-batch and accumulation, a multiple of `ranks`; None where the rows do not divide.
    """
    rows = micro_batch * accumulation
    size = next(sizes_that_divide(rows, micro_batch, ranks), None)
    return (size, rows // size) if size is not None else None


def sizes_that_divide(rows: int, largest: int, ranks: int) -> Iterator[int]:
    """Micro-batches up to the largest, largest first, of which a step has as many on each rank."""
    return (size for size in range(largest, 0, -1) if rows % (size * ranks) == 0)


def settle_ranks(
    given: Mapping[str, Any],
    *,
    is_named: bool,
    hardware: HardwareProfile | None = None,
    offered: OfferedCards | None = None,
) -> SharedRows:
    """Settle the number of cards where it is `auto` and the pod is known, then share the rows.

    A step keeps its rows, so that data, schedule and loss do not change. Values that cannot be used
    are left to the configuration, which says what is wrong with them.

    Args:
        given: Cards, pods, processes, micro-batch and accumulation by dotted key.
        is_named: The operator named the micro-batch or the accumulation, so both stay.
        hardware: Profile, which may allow a number of cards.
        offered: What the pod has; None if no pod was asked, and `auto` stays.
    """
    counts = [given[key] for key in (_PODS, _PROCESSES, _ROWS, _ACCUMULATION)]
    if any(not isinstance(count, int) or count < 1 for count in counts):
        return SharedRows()
    pods, processes, rows, accumulation = counts
    cards, found = given[_CARDS], SharedRows()

    def shared(number: int) -> tuple[int, int] | None:
        ranks = max(1, number) * pods * processes
        if is_named:
            return (rows, accumulation) if accumulation % ranks == 0 else None
        return share_rows(rows, accumulation, ranks)

    if cards == "auto" and offered is not None:
        allowed = hardware.max_gpus if hardware else None
        limit = offered.count if allowed is None else min(allowed, offered.count)
        fewest = 1 if allowed is None else min(1, allowed)
        cards = next((one for one in range(limit, 1, -1) if shared(one)), fewest)
        reasons = [offered.why]
        if hardware and allowed is not None:
            reasons.append(f"profile {hardware.name} allows {allowed}")
        if cards < limit:
            reasons.append(f"the rows of a step do not divide among {limit}")
        found.values[_CARDS] = cards
        found.notes.append(f"{_CARDS} auto is {cards}: {', '.join(reasons)}")
    if not isinstance(cards, int):
        return found
    batch = shared(cards)
    ranks = max(1, cards) * pods * processes
    if batch is not None and batch[0] != rows:
        found.values.update({_ROWS: batch[0], _ACCUMULATION: batch[1]})
        found.notes.append(
            f"{_ROWS} is {batch[0]} instead of {rows}, so that {ranks} ranks "
            f"share the {rows * accumulation} rows of a step: {batch[0]} x {batch[1]}"
        )
    return found
