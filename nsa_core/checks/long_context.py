"""Probes of the full tier: long rows forward, exact angles at far positions, packed documents.

Legend: T tokens of a row, R positions, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_core.checks.numerics import relative_error
from nsa_core.config.model import RopeConfig
from nsa_core.kernels.packing import Packing
from nsa_core.model.rotary import Rotary, amplitude, exact_frequencies
from nsa_core.model.transformer import LanguageModel

#: Memory may grow so much faster than the row (spec: what must be shown, 10).
GROWTH_LIMIT = 1.2
#: An angle of up to 65,536 rad is rounded twice: its frequency to float32 moves it by at most
#: 65,536 * 2^-24 rad, the product by as much again, together 2^-7 = 7.8e-3; a cosine or sine moves
#: no farther, and its own rounding is below 1e-6. Frequencies in bfloat16 are off by whole turns.
ANGLE_LIMIT = 8e-3


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of bytes that any operation returned in one tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and look at what it made; an expanded view counts what it stores."""
        del types
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                stored = min(leaf.untyped_storage().nbytes(), leaf.numel() * leaf.element_size())
                self.num_bytes = max(self.num_bytes, stored)
        return made


@dataclass(frozen=True)
class LongContextResult:
    """What a long row cost forward, and whether its end moved its beginning.

    Attributes:
        num_tokens: Tokens of the row; it was compared with one of half the length.
        memory_mib: Of its forward pass: peak above the weights on a card, the largest tensor on a
            CPU.
        growth: Growth of the memory over growth of the row, 1 is linear.
        moved_token: The earliest output that moved; None if none did.
    """

    num_tokens: int
    memory_mib: float
    growth: float
    moved_token: int | None

    @property
    def is_good(self) -> bool:
        """Causal, and linear in memory."""
        return self.moved_token is None and self.growth <= GROWTH_LIMIT


@torch.no_grad()
def long_context_probe(
    model: LanguageModel, *, num_tokens: int, seed: int = 0
) -> LongContextResult:
    """Change the last quarter of a long row; measure the memory of it and of half of it, forward.

    Under the caller's autocast and without gradients: `python -m nsa_core.bench model` measures
    what training takes. `num_tokens` is even.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.vocab_size
    tokens_1T = torch.randint(vocab_size, (1, num_tokens), generator=generator).to(device)
    half = _memory(model, tokens_1T[:, : num_tokens // 2])
    whole = _memory(model, tokens_1T)
    first_changed = num_tokens - num_tokens // 4
    changed_1T = tokens_1T.clone()
    changed_1T[:, first_changed:] = (changed_1T[:, first_changed:] + 1) % vocab_size
    before, after = (model.hidden(row)[:first_changed] for row in (tokens_1T, changed_1T))
    moved = torch.nonzero((before != after).any(dim=-1)).flatten()
    return LongContextResult(
        num_tokens,
        whole / 2**20,
        whole / half / 2,
        int(moved[0]) if len(moved) else None,
    )


def _memory(model: LanguageModel, tokens_1T: Tensor) -> int:
    """Bytes of one forward pass."""
    device = tokens_1T.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        model.hidden(tokens_1T)
        return int(torch.cuda.max_memory_allocated(device) - held)
    largest = LargestTensor()
    with largest:
        model.hidden(tokens_1T)
    return largest.num_bytes


def angle_error(rotary: Rotary, config: RopeConfig, width: int, device: torch.device) -> float:
    """Largest error of a cosine or sine at positions 32,768 .. 65,535, over the amplitude."""
    position_R = torch.arange(2**15, 2**16, device=device)
    exact = position_R.double()[:, None] * exact_frequencies(config, width).to(device)
    wanted = (exact.cos(), exact.sin())
    errors = [
        (table.squeeze(-2).double() / amplitude(config) - truth).abs().max()
        for table, truth in zip(rotary.tables(position_R), wanted, strict=True)
    ]
    return float(torch.stack(errors).max())


@torch.no_grad()
def packing_error(model: LanguageModel, lengths: list[int], seed: int = 0) -> float:
    """Relative L2 between the logits of documents packed in one row and one by one."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    shape = (1, sum(lengths))
    tokens_1T = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    packed_TV = model(tokens_1T, Packing.from_lengths(lengths, device))[0]
    alone = [model(document)[0] for document in torch.split(tokens_1T, lengths, dim=1)]
    return relative_error(packed_TV, torch.cat(alone))
