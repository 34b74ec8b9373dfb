"""The block sizes of Native Sparse Attention and the rules that tie them together."""

from typing import Literal, Self

from pydantic import Field, model_validator

from nsa_core.config.base import FrozenModel

#: The paper's symbols (arXiv 2502.11089) and the names they have here; used to answer `nsa.l`.
PAPER_SYMBOLS = {
    "l": "compress_block",
    "d": "compress_stride",
    "l_sel": "select_block",
    "n_sel": "num_selected",
    "n": "num_selected",
    "w": "window",
}


#: The first block, the one before a token's own and its own are always selected.
NUM_FORCED = 3


def check_block_sizes(compress_block: int, compress_stride: int, select_block: int) -> None:
    """Refuse block sizes, in tokens, that do not fit together.

    Raises:
        ValueError: If a block is no multiple of the stride, or a compressed one longer than a
            selectable one.
    """
    for name, size in (("compress_block", compress_block), ("select_block", select_block)):
        if size % compress_stride:
            message = f"{name} {size} must be a multiple of compress_stride {compress_stride}"
            raise ValueError(message)
    if compress_block > select_block:
        message = f"compress_block {compress_block} must not exceed select_block {select_block}"
        raise ValueError(message)


class NSAConfig(FrozenModel):
    """Sizes in tokens of the three branches; the defaults are the paper's section 4.1.

    Attributes:
        compress_block: Tokens pooled into one compressed key (paper: l).
        compress_stride: Tokens between the starts of two compressed blocks (paper: d).
        select_block: Tokens of one selectable block (paper: l').
        num_selected: Blocks a token attends to, forced ones included (paper: n).
        window: Keys of the sliding branch, the token itself included (paper: w).
        phi: How a block becomes one key: its mean, one matrix, or its mean plus a small MLP.
    """

    compress_block: int = Field(32, ge=1)
    compress_stride: int = Field(16, ge=1)
    select_block: int = Field(64, ge=1)
    num_selected: int = Field(16, ge=NUM_FORCED)
    window: int = Field(512, ge=1)
    phi: Literal["avg", "linear", "mlp"] = "mlp"

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        check_block_sizes(self.compress_block, self.compress_stride, self.select_block)
        return self

    def num_compressed(self, num_tokens: int) -> int:
        """Compressed blocks that a document of this many tokens has."""
        if num_tokens < self.compress_block:
            return 0
        return (num_tokens - self.compress_block) // self.compress_stride + 1
