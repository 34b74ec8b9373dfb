"""What a branch is to the attention kernels: the keys its rows see, and what its backward needs."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nsa_core.kernels.triton.launch import Kernel
from nsa_core.kernels.triton.row_terms import RowTerms
from nsa_core.kernels.triton.rows import CHOSEN, COMPRESSED, SLIDING

LOG2E = 1.4426950408889634

Direction = Literal["forward", "key_gradient"]
_KERNELS: dict[int, dict[Direction, Kernel]] = {
    COMPRESSED.value: {
        "forward": "compressed_forward",
        "key_gradient": "compressed_key_gradient",
    },
    SLIDING.value: {
        "forward": "sliding_forward",
        "key_gradient": "sliding_key_gradient",
    },
    CHOSEN.value: {
        "forward": "chosen_forward",
        "key_gradient": "chosen_key_gradient",
    },
}


@dataclass(frozen=True)
class Mode:
    """What a row sees: `kind` of `attend.py`, its span and stride in tokens, the bits of choice."""

    kind: int
    span: int
    stride: int
    bits: Tensor | None = None

    @property
    def num_words(self) -> int:
        """Words of bits of a token; 0 where nothing is chosen."""
        return 0 if self.bits is None else self.bits.shape[1]

    def kernel(self, direction: Direction) -> Kernel:
        """Name of this mode's kernel in the launch tables."""
        return _KERNELS[self.kind][direction]


def compressed_mode(compress_block: int, compress_stride: int) -> Mode:
    """Rows see the compressed blocks that end at or before them."""
    return Mode(COMPRESSED.value, compress_block, compress_stride)


def sliding_mode(window: int) -> Mode:
    """Rows see the last `window` tokens, themselves included."""
    return Mode(SLIDING.value, window, 1)


def chosen_mode(bits: Tensor) -> Mode:
    """Rows see the blocks whose bit is set in `bits` [G, words, padded tokens]."""
    return Mode(CHOSEN.value, 0, 1, bits)


@dataclass(frozen=True)
class GradientSource:
    """One branch in the backward pass: what its rows see, its keys and values, its rows' terms."""

    mode: Mode
    k: Tensor
    v: Tensor
    terms: RowTerms
