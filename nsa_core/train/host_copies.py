"""Copies of tensors in host memory that later updates do not touch, made with a short pause.

A card writes into pinned memory at the full speed of its link and without the processor. To pin
memory takes longer than to fill it, so it is reserved once and used again for every save: a copy is
good until the next one is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.train.checkpoint_files import to_host

#: Smallest block that is pinned at once; torch rounds up to powers of two, so that these lose none.
_BLOCK_BYTES = 2**28
#: Every tensor begins at a multiple of this.
_ALIGNMENT = 64

#: Allocates so many bytes of pinned host memory; a RuntimeError where the driver refuses.
Allocate = Callable[[int], Tensor]


@dataclass(frozen=True)
class BlockPlan:
    """How tensors share blocks of memory.

    Attributes:
        blocks: Bytes of each block.
        places: Block and offset of each tensor, in the order of the sizes given.
    """

    blocks: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def plan_blocks(sizes: Sequence[int], block_bytes: int = _BLOCK_BYTES) -> BlockPlan:
    """Put the largest first, each into the first block with room; pure.

    Args:
        sizes: Bytes of each tensor.
        block_bytes: A power of two; a larger tensor makes blocks of the next power of two.
    """
    largest = max(sizes, default=0)
    while block_bytes < largest:
        block_bytes *= 2
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        room = -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        block = next(
            (number for number, end in enumerate(used) if end + sizes[index] <= block_bytes),
            len(used),
        )
        if block == len(used):
            used.append(0)
        places[index] = (block, used[block])
        used[block] += room
    return BlockPlan((block_bytes,) * len(used), tuple(places))


def allocate_pinned(num_bytes: int) -> Tensor:
    """Pinned host memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class HostCopies:
    """Copies of a device's tensors, into memory that is used again by the next copy.

    Attributes:
        is_pinned: Whether copies of this device's tensors go into pinned memory.
    """

    def __init__(
        self,
        device: torch.device,
        report: Callable[[str], object],
        allocate: Allocate = allocate_pinned,
        *,
        is_pinned: bool | None = None,
    ) -> None:
        """Nothing is reserved yet.

        Args:
            device: Whose tensors are copied; on a CPU every copy is a new one.
            report: Gets one line if memory cannot be pinned and the copies are slower for it.
            allocate: Gives pinned memory.
            is_pinned: By default for a card.
        """
        self.is_pinned = device.type == "cuda" if is_pinned is None else is_pinned
        self._device = device
        self._report = report
        self._allocate = allocate
        self._blocks: list[Tensor] = []

    @property
    def reserved_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(block.numel() for block in self._blocks)

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Pin room for tensors like these, before the first copy has to wait for it."""
        if self.is_pinned:
            self._reserve(plan_blocks([tensor.nbytes for tensor in tensors]))

    def copy(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies of all tensors, whole when this returns; those of the last call are lost."""
        if not self.is_pinned:
            return {name: to_host(dict(group)) for name, group in groups.items()}
        flat = [
            (group, name, tensor.detach())
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
            if tensor.device.type == self._device.type
        ]
        plan = plan_blocks([tensor.nbytes for _, _, tensor in flat])
        self._reserve(plan)
        if not self.is_pinned:  # as _reserve has found out, and reported
            return self.copy(groups)
        copies: dict[str, dict[str, Tensor]] = {name: {} for name in groups}
        for (group, name, tensor), (block, offset) in zip(flat, plan.places, strict=True):
            place = self._blocks[block][offset : offset + tensor.nbytes]
            host = place.view(tensor.dtype).view(tensor.shape)
            copies[group][name] = host.copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for group, tensors in groups.items():
            rest = {name: one for name, one in tensors.items() if name not in copies[group]}
            copies[group] |= to_host(rest)
        return copies

    def _reserve(self, plan: BlockPlan) -> None:
        """Have the blocks of a plan; without them, copy into memory that is not pinned."""
        kept = [block for block in self._blocks if block.numel() == max(plan.blocks, default=0)]
        try:
            for num_bytes in plan.blocks[len(kept) :]:
                kept.append(self._allocate(num_bytes))  # noqa: PERF401 - keeps those before a fault
        except RuntimeError as error:
            self._blocks, self.is_pinned = [], False
            first = str(error).strip().partition("\n")[0]
            self._report(
                f"{sum(plan.blocks):,} bytes of host memory cannot be pinned ({first}): the loop "
                "pauses longer for each checkpoint"
            )
            return
        if plan.blocks:
            self._blocks = kept
