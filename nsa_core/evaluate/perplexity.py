"""Loss, bits per byte and perplexity of a model on held-out documents."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.config.training import Precision
from nsa_core.data.batch import TokenBatch
from nsa_core.evaluate.device import autocast, move
from nsa_core.model.transformer import LanguageModel


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts text.

    Attributes:
        loss: Mean nats per target token.
        num_bytes: Bytes of text that they stand for.
    """

    loss: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers; an end token costs bits and is no byte of text."""
        return self.loss * self.num_tokens / math.log(2) / max(1, self.num_bytes)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def do_nothing(sums: Tensor) -> None:
    """The sum over one rank."""


@torch.no_grad()
def measure_perplexity(
    model: LanguageModel,
    batches: Iterable[TokenBatch],
    precision: Precision,
    poll: Callable[[], None],
    sum_in_place: Callable[[Tensor], None] = do_nothing,
) -> Perplexity:
    """Mean over all targets of all batches, in eval mode; the model's mode is restored.

    `sum_in_place` replaces a float64 tensor by its sum over all ranks, which have other batches.

    Raises:
        ValueError: If no batch has a target.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = num_bytes = 0
    try:
        for batch in batches:
            poll()
            with autocast(device, precision):
                total += model.loss(*move(batch, device)).sum
            num_tokens += batch.num_targets
            num_bytes += batch.num_text_bytes
    finally:
        model.train(was_training)
    sums = torch.stack([total, total.new_tensor(num_tokens), total.new_tensor(num_bytes)])
    sum_in_place(sums)
    loss, num_tokens, num_bytes = sums[0].item(), int(sums[1]), int(sums[2])
    if num_tokens == 0:
        message = "the validation batches have no target tokens"
        raise ValueError(message)
    return Perplexity(loss / num_tokens, num_tokens, num_bytes)
