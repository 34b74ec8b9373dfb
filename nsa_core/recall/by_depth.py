"""Associative recall: can the model repeat what followed a token far back in its context?

The text is `k1 v1 k2 v2 … | k`, random ids that mean nothing, so only attention can answer; the
needle is a pair at a chosen depth. A model that was never trained to recall scores near chance,
and that is a result too: it is compared with chance and never gates a run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.config.training import Precision
from nsa_core.evaluate.device import autocast
from nsa_core.evaluate.needle import DEPTHS
from nsa_core.model.transformer import LanguageModel

#: Tokens of one pair and the key that asks for it.
SHORTEST = 3


@dataclass(frozen=True)
class Recall:
    """Share of right answers by depth of the needle.

    Attributes:
        accuracy: Right answers at each depth of `DEPTHS`, 0 to 1.
        chance: What guessing among the values of the context would give.
    """

    accuracy: tuple[float, ...]
    chance: float
    num_trials: int
    context: int


def make_contexts(
    vocab_size: int, context: int, depth: float, num_trials: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Contexts [B, T] that end in a key, and the value [B] that followed it; pure.

    Keys are distinct within a context, and so is each key from every value.
    `context` T is odd and below `vocab_size`; depth 0 asks for the first pair, 1 for the last.
    """
    num_pairs = (context - 1) // 2
    generator = torch.Generator().manual_seed(seed)
    rows, answers = [], []
    for _ in range(num_trials):
        ids = torch.randperm(vocab_size, generator=generator)[: 2 * num_pairs]
        asked = round(depth * (num_pairs - 1))
        rows.append(torch.cat([ids, ids[2 * asked : 2 * asked + 1]]))
        answers.append(ids[2 * asked + 1])
    return torch.stack(rows), torch.stack(answers)


@torch.no_grad()
def measure_recall(
    model: LanguageModel,
    precision: Precision,
    *,
    max_context: int,
    num_trials: int = 8,
    seed: int = 0,
    poll: Callable[[], None],
) -> Recall:
    """Ask for pairs at several depths; the answer is the most likely of the context's values.

    All ids of a context differ, so a small vocabulary shortens it below `max_context`; one pair and
    its key are the shortest there is. The mode of the model is restored; `poll` is called before
    each depth, and may raise.
    """
    device = next(model.parameters()).device
    context = max(SHORTEST, min(max_context, model.config.vocab_size))
    context -= 1 - context % 2
    was_training = model.training
    model.eval()
    accuracy = []
    try:
        for number, depth in enumerate(DEPTHS):
            poll()
            tokens_BT, answers_B = make_contexts(
                model.config.vocab_size, context, depth, num_trials, seed + number
            )
            with autocast(device, precision):
                logits_BV = model(tokens_BT.to(device))[:, -1].float().cpu()
            values_BP = tokens_BT[:, 1:-1:2]
            chosen_B = values_BP.gather(
                1, logits_BV.gather(1, values_BP).argmax(dim=1, keepdim=True)
            )[:, 0]
            accuracy.append(float((chosen_B == answers_B).float().mean()))
    finally:
        model.train(was_training)
    return Recall(tuple(accuracy), 2 / (context - 1), num_trials, context)
