"""Probe that a model says the same token by token as in one pass.

Legend: B sequences, T tokens of a row, V vocabulary.
"""

from dataclasses import dataclass

import torch

from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import logits, prefill
from nsa_core.model.decode_loop import DecodeLoop
from nsa_core.model.transformer import LanguageModel


@dataclass(frozen=True)
class DecodeResult:
    """How far decode is from one pass.

    Attributes:
        num_tokens: Tokens of the row.
        difference: Largest absolute difference of a logit; NaN is a failure.
        limit: What it may be in float32 (spec: what must be shown, 6).
    """

    num_tokens: int
    difference: float
    limit: float = 1e-5

    @property
    def is_equal(self) -> bool:
        """Within the limit."""
        return self.difference <= self.limit


@torch.no_grad()
def decode_probe(
    model: LanguageModel,
    *,
    num_tokens: int,
    prompt: int,
    one_pass: LanguageModel | None = None,
    seed: int = 0,
) -> DecodeResult:
    """Take a prompt in chunks, then single tokens, and compare every logit with one pass.

    The single tokens go the way that generation takes: through one CUDA graph on a card.

    Args:
        model: In float32.
        num_tokens: T, best beyond the window.
        prompt: Tokens that are prefilled, in chunks that divide neither them nor the blocks.
        one_pass: The same weights on backends that train in float32; `model` if left out.
        seed: Of the tokens.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.vocab_size
    tokens_BT = torch.randint(vocab_size, (1, num_tokens), generator=generator).to(device)
    wanted_TV = (one_pass or model)(tokens_BT)[0]
    cache = DecodeCache.allocate(
        model.config,
        batch=1,
        capacity=num_tokens,
        chunk=max(1, prompt // 3 + 1),
        dtype=torch.float32,
        device=device,
    )
    step = prefill(model, cache, tokens_BT[:, :prompt])
    worst = (logits(model, step)[0] - wanted_TV[prompt - 1]).abs().max()
    loop = DecodeLoop(model, cache)
    for position in range(prompt, num_tokens):
        found_V = loop.step(tokens_BT[:, position]).logits_BV[0]
        difference = (found_V - wanted_TV[position]).abs().max()
        worst = torch.maximum(worst, difference)
    return DecodeResult(num_tokens, worst.item())
