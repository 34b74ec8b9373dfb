"""The floor of an attention layer: its own arithmetic at the rate of a matrix product."""

from dataclasses import dataclass

from nsa_core.config.counts import mean_visible_keys
from nsa_core.config.model import ModelConfig

#: Products of a backward pass over those of the forward: five to two.
BACKWARD = 2.5


@dataclass(frozen=True)
class Floor:
    """Milliseconds that the arithmetic alone takes.

    Attributes:
        fwd_ms: Compressed branch, its scoring pass, selected branch and window.
        fwd_bwd_ms: The same and 2.5 times the branches; nothing is scored backward.
    """

    fwd_ms: float
    fwd_bwd_ms: float


def attention_floor(model: ModelConfig, length: int, tokens: int, tflops: float) -> Floor:
    """The floor of one layer of NSA over `tokens` tokens in documents of `length`.

    Args:
        model: Heads, widths and block sizes.
        length: Tokens of a document.
        tokens: Tokens of the call.
        tflops: Rate of a matrix product, in TFLOP/s.
    """
    keys = mean_visible_keys(model, length)
    per_key = 2.0 * tokens * model.num_heads
    branches = per_key * (model.head_dim_k + model.head_dim_v)
    branches *= keys.compressed + keys.selected + keys.sliding
    scoring = per_key * model.head_dim_k * keys.compressed
    per_ms = tflops * 1e9
    forward = (branches + scoring) / per_ms
    return Floor(forward, forward + BACKWARD * branches / per_ms)
