"""Which blocks a token sees, which it always attends to, and which of them overlap."""

from dataclasses import dataclass, fields
from typing import Self, TypeVar

from torch import Tensor

from nsa_core.config.model import NUM_FORCED, NSAConfig, check_block_sizes
from nsa_core.kernels.inputs import require_count

Block = TypeVar("Block", int, Tensor)


def is_forced(block: Block, current: Block) -> Block:
    """Whether a token in block `current` always attends to `block`: first, previous or its own.

    For integers and, element by element, for tensors; the Triton kernels have theirs in `rows.py`.
    """
    return (block == 0) | (block == current) | (block == current - 1)


@dataclass(frozen=True)
class BlockGeometry:
    """Block sizes in tokens; every position and block index is counted from its document's start.

    Attributes:
        compress_block: Tokens of one compressed block (paper: l).
        compress_stride: Tokens between the starts of two compressed blocks (paper: d).
        select_block: Tokens of one selectable block (paper: l').
        num_selected: Blocks a token attends to, forced ones included (paper: n).
        window: Keys of the sliding branch, the token itself included (paper: w).
    """

    compress_block: int
    compress_stride: int
    select_block: int
    num_selected: int
    window: int

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing, as the configuration does.

        Raises:
            ValueError: If one is below its least value, or they do not fit together.
        """
        for field in fields(self):
            least = NUM_FORCED if field.name == "num_selected" else 1
            require_count(field.name, getattr(self, field.name), least=least)
        check_block_sizes(self.compress_block, self.compress_stride, self.select_block)

    @classmethod
    def from_config(cls, config: NSAConfig) -> Self:
        """Take the sizes of a checked configuration."""
        return cls(
            compress_block=config.compress_block,
            compress_stride=config.compress_stride,
            select_block=config.select_block,
            num_selected=config.num_selected,
            window=config.window,
        )

    def num_compressed(self, num_tokens: int) -> int:
        """Compressed blocks that lie wholly within the first `num_tokens` tokens.

        The token at position t sees exactly `num_compressed(t + 1)` of them.
        """
        if num_tokens < self.compress_block:
            return 0
        return (num_tokens - self.compress_block) // self.compress_stride + 1

    def next_compressed(self, position: int) -> int:
        """Compressed block that the token at this position completes, or the next one to be."""
        return max(0, (position - self.compress_block) // self.compress_stride + 1)

    def num_cached(self, num_tokens: int) -> int:
        """Rows of compressed keys that a cache of this many tokens reserves.

        Those of whole selection blocks: room for the block that is not complete yet too, and
        decode of a short cache need not ask of each row whether there is one.
        """
        return self.num_select_blocks(num_tokens) * self.compressed_per_select

    def num_select_blocks(self, num_tokens: int) -> int:
        """Selection blocks that start within the first `num_tokens` tokens; the last may be cut."""
        return -(-num_tokens // self.select_block)

    def num_slots(self, num_tokens: int) -> int:
        """Rows of the packed compressed keys and values of a call with this many tokens."""
        return num_tokens // self.compress_stride

    @property
    def compressed_per_select(self) -> int:
        """Strides in one selection block: the step of `first_overlap` between neighbours."""
        return self.select_block // self.compress_stride

    @property
    def overlap_weights(self) -> tuple[int, ...]:
        """Strides that a selection block shares with each compressed block that touches it (Eq. 9).

        Entry m belongs to compressed block `first_overlap(j) + m`; 32/16/64 gives 1, 2, 2, 2, 1.
        """
        strides = self.compress_block // self.compress_stride
        offsets = range(1 - strides, self.compressed_per_select)
        return tuple(
            min(offset + strides, self.compressed_per_select) - max(offset, 0) for offset in offsets
        )

    def first_overlap(self, select_index: int) -> int:
        """Lowest compressed block that touches this selection block; negative ones do not exist."""
        strides = self.compress_block // self.compress_stride
        return select_index * self.compressed_per_select - strides + 1

    def forced_blocks(self, position: int) -> tuple[int, ...]:
        """Blocks that a token always attends to, ascending: the first, the previous, its own."""
        current = position // self.select_block
        return tuple(block for block in range(current + 1) if is_forced(block, current))

    def num_chosen(self, position: int) -> int:
        """Blocks a token attends to: `num_selected`, or all that have started if they are fewer."""
        return min(self.num_selected, position // self.select_block + 1)
