"""The widths of the language model and the block sizes of Native Sparse Attention."""

from typing import Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from nsa_core.config.base import ConfigSection

#: The paper's symbols (arXiv 2502.11089) and the names they have here; used to answer `nsa.l`.
PAPER_SYMBOLS = {
    "l": "compress_block",
    "d": "compress_stride",
    "l_sel": "select_block",
    "n_sel": "num_selected",
    "n": "num_selected",
    "w": "window",
}
#: Tokens of a row, and positions of a document: float32 holds every whole number up to here, and
#: two positions beyond it may have one angle.
MAX_POSITIONS = 2**24
#: The first block, the one before a token's own and its own are always selected.
NUM_FORCED = 3
#: Beyond these a float32 logit over it may not be finite, or no branch differs from another.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6


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


class NSAConfig(ConfigSection):
    """Sizes in tokens of the three branches; the defaults are the paper's section 4.1."""

    compress_block: int = Field(32, ge=1)  # tokens pooled into one compressed key (paper: l)
    #: Tokens between the starts of two compressed blocks (paper: d).
    compress_stride: int = Field(16, ge=1)
    select_block: int = Field(64, ge=1)  # tokens of one selectable block (paper: l')
    #: Blocks a token attends to, forced ones included (paper: n).
    num_selected: int = Field(16, ge=NUM_FORCED)
    #: Keys of the sliding branch, the token itself included (paper: w).
    window: int = Field(512, ge=1)
    #: How a block becomes one key: its mean, one matrix, or its mean plus a small MLP.
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


class GateConfig(ConfigSection):
    """How the three branches are mixed (paper Eq. 5)."""

    #: `linear` is sigmoid(W x + b); `mlp` puts one hidden layer before it; `softmax` makes the
    #: three shares sum to one.
    kind: Literal["linear", "mlp", "softmax"] = "linear"
    #: Divides the logits of `softmax`; 1 for the other kinds, which have none.
    temperature: float = Field(1.0, gt=0)
    per: Literal["head", "group"] = "head"  # one gate per query head, or one per key/value group

    @model_validator(mode="after")
    def _check_temperature(self, info: ValidationInfo) -> Self:
        if info.mode == "json":  # a record of a run: what it was trained with has to load
            return self
        if self.kind != "softmax" and self.temperature != 1:
            message = (
                f"temperature {self.temperature:g} does nothing while kind is {self.kind}; "
                "set model.gate.kind to softmax, or model.gate.temperature to 1"
            )
            raise ValueError(message)
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            message = (
                f"temperature must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
                f"got {self.temperature}"
            )
            raise ValueError(message)
        return self


class RopeConfig(ConfigSection):
    """Rotary position embedding: base frequency and how it is stretched for longer contexts."""

    #: Base of the geometric series of wavelengths.
    base: float = Field(10_000.0, gt=1)
    #: `none`, `linear` (positions divided by `scale`) or `yarn` (arXiv 2309.00071).
    scaling: Literal["none", "linear", "yarn"] = "none"
    #: Target context over trained context; 1 changes nothing, more needs a `scaling`.
    scale: float = Field(1.0, ge=1)
    trained_context: int = Field(2048, ge=1)  # tokens the model was trained with; `yarn` needs it

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.scaling == "none" and self.scale != 1:
            message = (
                f"scale {self.scale:g} does nothing while scaling is none; "
                "set model.rope.scaling to linear or yarn, or model.rope.scale to 1"
            )
            raise ValueError(message)
        return self


class ModelConfig(ConfigSection):
    """A decoder-only language model with NSA or, as the control, dense causal attention."""

    attention: Literal["nsa", "dense"] = "nsa"
    vocab_size: int = Field(50_304, ge=2)
    dim: int = Field(768, ge=1)
    num_layers: int = Field(12, ge=1)
    num_heads: int = Field(12, ge=1)
    num_kv_groups: int = Field(2, ge=1)
    head_dim_k: int = Field(64, ge=2)
    head_dim_v: int = Field(64, ge=1)
    mlp_width: int = Field(2048, ge=1)
    activation: Literal["swiglu", "silu"] = "swiglu"
    tie_embeddings: bool = True
    norm_eps: float = Field(1e-6, gt=0)
    gate: GateConfig = GateConfig()
    rope: RopeConfig = RopeConfig()
    nsa: NSAConfig = NSAConfig()

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if self.num_heads % self.num_kv_groups:
            message = (
                f"num_heads {self.num_heads} must be a multiple of "
                f"num_kv_groups {self.num_kv_groups}"
            )
            raise ValueError(message)
        if self.head_dim_k % 2:
            message = f"head_dim_k {self.head_dim_k} must be even: rotary embedding turns pairs"
            raise ValueError(message)
        return self

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_groups
