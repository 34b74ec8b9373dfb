"""Probes that a model which sees the future, or another document, cannot pass.

Legend: B batch, T tokens of a row, N = B * T, W model width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from nsa_core.kernels.packing import Packing
from nsa_core.model.loss import LossSum

#: Tokens and documents in, logits [B, T, V] out.
Forward = Callable[[Tensor, Packing | None], Tensor]
#: Tokens and targets in, summed loss out.
Loss = Callable[[Tensor, Tensor], LossSum]


@dataclass(frozen=True)
class Change:
    """Tokens start .. stop - 1 are replaced; outputs kept_start .. kept_stop - 1 must not move."""

    is_packed: bool
    start: int
    stop: int
    kept_start: int
    kept_stop: int


@dataclass(frozen=True)
class Leak:
    """An output that moved although nothing it may see was changed.

    Attributes:
        length: Tokens of the row.
        change: What was changed and what had to stay.
        token: The earliest output that moved.
        difference: Largest absolute change among its logits; NaN counts as a change.
    """

    length: int
    change: Change
    token: int
    difference: float


@dataclass(frozen=True)
class PerturbationResult:
    """What the perturbation probe found."""

    num_cases: int
    leaks: tuple[Leak, ...]

    @property
    def is_causal(self) -> bool:
        """No output moved by a single bit."""
        return not self.leaks


def plan_changes(length: int) -> list[Change]:
    """Changes of a row of this many tokens, as one document and as two cut at a third.

    With two documents the first one alone is changed as well, and the second must not move.
    """
    cut = length // 3
    starts = sorted({1, length // 4, cut, length // 2, length - 2, length - 1} - {0, -1})
    changes = [
        Change(is_packed, start, length, 0, start)
        for is_packed in ((False, True) if cut else (False,))
        for start in starts
        if start < length
    ]
    if cut:
        changes.append(Change(is_packed=True, start=0, stop=cut, kept_start=cut, kept_stop=length))
    return changes


@torch.no_grad()
def perturbation_probe(
    forward: Forward,
    *,
    vocab_size: int,
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PerturbationResult:
    """Change tokens and demand that every output that cannot see them keeps every bit.

    Choose lengths below, at and above the window, and no multiples of the block sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    leaks: list[Leak] = []
    num_cases = 0
    for length in lengths:
        tokens = torch.randint(vocab_size, (1, length), generator=generator)
        steps = torch.randint(1, vocab_size, (1, length), generator=generator)
        tokens, other = tokens.to(device), ((tokens + steps) % vocab_size).to(device)
        documents = [length // 3, length - length // 3]
        pair = Packing.from_lengths(documents, device) if length // 3 else None
        alone, packed = forward(tokens, None)[0], forward(tokens, pair)[0]
        for change in plan_changes(length):
            num_cases += 1
            changed = tokens.clone()
            changed[:, change.start : change.stop] = other[:, change.start : change.stop]
            after = forward(changed, pair if change.is_packed else None)[0]
            leaks += _find_leak(length, change, packed if change.is_packed else alone, after)
    return PerturbationResult(num_cases, tuple(leaks))


def _find_leak(length: int, change: Change, before_TV: Tensor, after_TV: Tensor) -> list[Leak]:
    kept = slice(change.kept_start, change.kept_stop)
    difference_T = (before_TV[kept].float() - after_TV[kept].float()).abs().amax(dim=-1)
    is_equal_T = (before_TV[kept] == after_TV[kept]).all(dim=-1)
    moved = torch.nonzero(~is_equal_T).flatten().tolist()
    if not moved:
        return []
    first = moved[0]
    return [Leak(length, change, change.kept_start + first, difference_T[first].item())]


@dataclass(frozen=True)
class SentinelSettings:
    """Size of the random-token sentinel; the defaults are the bar of the specification.

    On fresh uniform tokens the expected loss of a causal model is ln V plus a divergence, so never
    below ln V, whatever the batch. With a spread of at most 1 nat per token, 50 steps of 512
    tokens leave a standard error of 0.006 nats: the margin of 0.02 is still 3 of them. In practice
    the spread is below 0.3 nats, because the logits stay near 0.
    """

    vocab_size: int = 64
    steps: int = 200
    batch: int = 16
    seq_len: int = 256
    judged_steps: int = 50
    margin: float = 0.02
    learning_rate: float = 3e-3
    seed: int = 0

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """The specification's size on a card; elsewhere the least that the margin allows."""
        return cls() if device.type == "cuda" else cls(steps=80, batch=4, seq_len=128)

    @property
    def limit(self) -> float:
        """The mean loss of the judged steps must not be below this, in nats."""
        return math.log(self.vocab_size) - self.margin


@dataclass(frozen=True)
class SentinelResult:
    """Losses of a model trained on tokens that nobody can predict."""

    losses: tuple[float, ...]
    mean_loss: float
    limit: float

    @property
    def is_causal(self) -> bool:
        """The model could not predict the unpredictable; NaN is a failure."""
        return self.mean_loss >= self.limit


def sentinel_probe(
    parameters: Sequence[nn.Parameter],
    loss: Loss,
    settings: SentinelSettings,
    device: torch.device | str = "cpu",
) -> SentinelResult:
    """Train on fresh random tokens; a loss clearly below ln V means a view of the future."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    losses = []
    for _ in range(settings.steps):
        shape = (settings.batch, settings.seq_len + 1)
        row = torch.randint(settings.vocab_size, shape, generator=generator).to(device)
        result = loss(row[:, :-1], row[:, 1:])
        mean = result.sum / result.count
        optimizer.zero_grad()
        torch.autograd.backward(mean)
        optimizer.step()
        losses.append(mean.detach())
    values = torch.stack(losses).tolist()
    judged = values[-settings.judged_steps :]
    return SentinelResult(tuple(values), sum(judged) / len(judged), settings.limit)
