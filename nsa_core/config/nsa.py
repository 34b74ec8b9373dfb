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
    num_selected: int = Field(16, ge=3)
    window: int = Field(512, ge=1)
    phi: Literal["avg", "linear", "mlp"] = "mlp"

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for name in ("compress_block", "select_block"):
            size = getattr(self, name)
            if size % self.compress_stride:
                message = (
                    f"{name} {size} must be a multiple of compress_stride {self.compress_stride}"
                )
                raise ValueError(message)
        if self.compress_block > self.select_block:
            message = (
                f"compress_block {self.compress_block} must not exceed "
                f"select_block {self.select_block}"
            )
            raise ValueError(message)
        return self

    def num_compressed(self, num_tokens: int) -> int:
        """Compressed blocks that a document of this many tokens has."""
        if num_tokens < self.compress_block:
            return 0
        return (num_tokens - self.compress_block) // self.compress_stride + 1
