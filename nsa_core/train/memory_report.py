"""memory_attempt{k}_rank{r}.json: what filled a card that ran out of memory, and what to change."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nsa_core.config.base import FrozenModel
from nsa_core.config.run import RunConfig, find_sharding_obstacle
from nsa_core.config.step_memory import estimate_step
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.layout import RunDir

_MIB = 2**20
#: Kinds of blocks that are listed, those that hold most first.
MOST_KINDS = 30
#: Share of a card that other processes, or pieces without a tensor, must have to be the cause.
_OTHERS_SHARE = 0.05
_PIECES_SHARE = 0.15
_EXPANDABLE = "expandable_segments:True"


class BlockKind(FrozenModel):
    """Blocks of one size that tensors hold."""

    mib: float
    count: int


class CardMemory(FrozenModel):
    """A card when its memory ran out, in MiB.

    Attributes:
        others: Held by other processes, and by CUDA itself.
        allocated: In tensors of this process.
        reserved: Taken from the card by torch, with the pieces that no tensor uses.
        peak: Most that was in tensors at once.
        largest: Sizes of blocks with their number, those that hold most first.
    """

    name: str
    total: float
    others: float
    allocated: float
    reserved: float
    peak: float
    largest: list[BlockKind] = []


class MemoryReport(FrozenModel):
    """Content of memory_attempt{k}_rank{r}.json.

    Attributes:
        error: What torch said.
        card: None where the host ran out of memory.
        estimate: MiB of a step by part, before anything was launched.
        advice: What to change, the most promising first.
    """

    at: float
    attempt: int
    rank: int
    step: int
    phase: str
    error: str
    card: CardMemory | None
    estimate: dict[str, float]
    advice: list[str]


def count_blocks(segments: Sequence[Mapping[str, Any]]) -> list[BlockKind]:
    """The blocks in use of `torch.cuda.memory_snapshot`, by size; pure."""
    sizes = Counter(
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    ordered = sorted(sizes.items(), key=lambda item: -item[0] * item[1])
    return [BlockKind(mib=round(size / _MIB, 3), count=count) for size, count in ordered][
        :MOST_KINDS
    ]


def read_card_memory() -> CardMemory | None:
    """The current card of this process; None without one, or where the driver gives no answer."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        return None
    try:
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return CardMemory(
            name=torch.cuda.get_device_name(),
            total=total / _MIB,
            others=max(0, total - free - reserved) / _MIB,
            allocated=torch.cuda.memory_allocated() / _MIB,
            reserved=reserved / _MIB,
            peak=torch.cuda.max_memory_allocated() / _MIB,
            largest=count_blocks(torch.cuda.memory_snapshot()),  # type: ignore[no-untyped-call]
        )
    except RuntimeError:  # a card that failed as well; the error that is reported is the first
        return None


def advise_memory(config: RunConfig, card: CardMemory | None) -> list[str]:
    """What to change so that a step fits, the most promising first; pure."""
    found = _of_the_card(config, card) if card is not None else []
    part = estimate_step(config)
    grows = part.activations + part.logits
    knobs = [*_of_the_batch(config), *_of_the_activations(config)]
    state = _of_the_state(config)
    found += [*knobs, *state] if grows >= part.total - grows else [*state, *knobs]
    return found or ["Take a card with more memory, or a smaller model"]


def _of_the_card(config: RunConfig, card: CardMemory) -> list[str]:
    found = []
    if card.others > _OTHERS_SHARE * card.total:
        found.append(
            f"End the other processes on the card, which hold {card.others:,.0f} MiB "
            "(`nvidia-smi` names them)"
        )
    pieces = card.reserved - card.allocated
    if pieces > _PIECES_SHARE * card.total and _EXPANDABLE not in config.runtime.allocator:
        found.append(
            f"Set runtime.allocator={_EXPANDABLE}: {pieces:,.0f} MiB are in pieces that no tensor "
            "uses"
        )
    return found


def _of_the_batch(config: RunConfig) -> list[str]:
    micro, accumulation = config.batch.micro_batch, config.batch.accumulation
    smaller = max((size for size in range(1, micro) if micro % size == 0), default=None)
    if smaller is None:
        return []
    more = accumulation * micro // smaller
    return [f"Set batch.micro_batch={smaller} and batch.accumulation={more}: the same step"]


def _of_the_activations(config: RunConfig) -> list[str]:
    order = ("none", "selective", "full")
    now = order.index(config.runtime.activation_checkpointing)
    return [
        f"Set runtime.activation_checkpointing={one}: less memory, more time"
        for one in order[now + 1 :]
    ]


def _of_the_state(config: RunConfig) -> list[str]:
    if config.runtime.sharding == "fsdp" or find_sharding_obstacle(config) is not None:
        return []
    if config.num_ranks > 1:
        return ["Set runtime.sharding=fsdp: each card keeps a part of the state"]
    return ["Use several cards with runtime.num_gpus and runtime.sharding=fsdp"]


def make_memory_report(
    config: RunConfig, *, attempt: int, rank: int, step: int, phase: str, error: str
) -> MemoryReport:
    """What fills the memory now, after `error`."""
    card = read_card_memory()
    return MemoryReport(
        at=time.time(),
        attempt=attempt,
        rank=rank,
        step=step,
        phase=phase,
        error=error[:2000],
        card=card,
        estimate={name: round(mib, 1) for name, mib in vars(estimate_step(config)).items()},
        advice=advise_memory(config, card),
    )


def write_memory_report(run: RunDir, report: MemoryReport) -> None:
    """Write it whole."""
    path = run.memory_report(report.attempt, report.rank)
    write_text(path, report.model_dump_json(indent=2) + "\n")
