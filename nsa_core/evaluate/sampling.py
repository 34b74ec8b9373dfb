"""Continue a prompt token by token through the decode cache; tokens are drawn on the device.

Legend: V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.config.model import MAX_TEMPERATURE, MIN_TEMPERATURE
from nsa_core.data.tokenizer import Tokenizer
from nsa_core.kernels.inputs import require_count
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import logits, prefill
from nsa_core.model.decode_step import DecodeLoop
from nsa_core.model.transformer import LanguageModel

#: Replaces bytes that are not UTF-8; at the end of a text, a character may be unfinished.
UNREADABLE = "\ufffd"
#: A character has at most 4 bytes: more unreadable ids than that are broken for good.
MAX_HELD = 4


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Draw from the smallest set of tokens with at least this probability.
        seed: Of the draws; another kind of device draws other tokens from the same seed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, NaN among them."""
        limits = f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            message = f"temperature must be {limits}, got {self.temperature}"
            raise ValueError(message)
        if not 0 < self.top_p <= 1:
            message = f"top_p must be above 0 and at most 1, got {self.top_p}"
            raise ValueError(message)
        if not 0 <= self.seed < 2**64:
            message = f"seed must be 0 or more and below 2^64, got {self.seed}"
            raise ValueError(message)


def pick_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draw one token id [1] on the device of the logits; greedy ties take the lowest id."""
    if sampling.temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    prob_V = torch.softmax(logits_V.float() / sampling.temperature, dim=-1)
    sorted_V, order_V = prob_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(dim=-1) - sorted_V
    kept_V = sorted_V * (before_V < sampling.top_p)
    return order_V[torch.multinomial(kept_V, 1, generator=generator)]


class _TokenArrival:
    """A token on its way to the host; the device keeps computing meanwhile."""

    def __init__(self, token_1: Tensor) -> None:
        self._event: torch.Event | None = None
        self._value = token_1
        if token_1.is_cuda:
            self._value = torch.empty(1, dtype=token_1.dtype, pin_memory=True)
            self._value.copy_(token_1, non_blocking=True)
            self._event = torch.Event("cuda")
            self._event.record()

    def wait(self) -> int:
        """The id, once it is here."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._value)


def stream(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    prefill_chunk: int = 512,
    num_ids: int | None = None,
) -> Iterator[int]:
    """Ids that continue the prompt, the stop token left out.

    Each comes when the step after it has been started: a card never waits for the host.

    Without `sampling` it is greedy. `stop_token` ends the text; `prefill_chunk` tokens of the
    prompt are taken at a time. Only the first `num_ids` ids are drawn: a vocabulary may be padded
    beyond its tokenizer's.

    Raises:
        ValueError: If the prompt is empty, an id is not in the vocabulary, or a count is below 1;
            at once, before the first id is asked for.
    """
    vocab_size = model.config.vocab_size
    require_count("max_new_tokens", max_new_tokens)
    require_count("prefill_chunk", prefill_chunk)
    require_count("num_ids", vocab_size if num_ids is None else num_ids, most=vocab_size)
    if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab_size:
        message = f"the prompt needs at least one id, all in 0 .. {vocab_size - 1}"
        raise ValueError(message)
    how = sampling or Sampling()

    def draw() -> Iterator[int]:
        weight = model.embedding.weight
        generator = torch.Generator(weight.device).manual_seed(how.seed)
        cache = DecodeCache.allocate(
            model.config,
            batch=1,
            capacity=len(prompt) + max_new_tokens,
            chunk=prefill_chunk,
            dtype=weight.dtype,
            device=weight.device,
        )
        loop = DecodeLoop(model, cache)
        step = prefill(model, cache, torch.tensor([list(prompt)], device=weight.device))
        logits_BV = logits(model, step)
        for count in range(1, max_new_tokens + 1):
            token_1 = pick_token(logits_BV[0, :num_ids], how, generator)
            arrival = _TokenArrival(token_1)
            if count < max_new_tokens:
                logits_BV = loop.step(token_1).logits_BV
            token = arrival.wait()
            if token == stop_token:
                return
            yield token

    return draw()


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Pieces that join to the decoded text; bytes that never become a character are U+FFFD."""
    held: list[int] = []
    for token in ids:
        held.append(token)
        text = tokenizer.decode(held)
        if text.endswith(UNREADABLE) and len(held) < MAX_HELD:
            continue
        held = []
        if text:
            yield text
    if held:
        yield tokenizer.decode(held)
