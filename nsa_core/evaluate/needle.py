"""Needle in a haystack: does a model still know an early sentence at the end of a long text?

The text is plain and the same for every tokenizer: a haystack of sentences, one sentence with a
number at some depth, and at the end the beginning of that sentence again. The answer is scored in
one pass. Beside the share of right answers it shows how many nats the needle saves on the answer:
a small language model that cannot spell a whole number may still be seen to use it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa_core.config.training import Precision
from nsa_core.data.tokenizer import Tokenizer
from nsa_core.evaluate.device import autocast
from nsa_core.model.transformer import LanguageModel

#: Where the needle is: 0 is the beginning of the text.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PLACES = ("harbour", "mill", "chapel", "station", "library", "bakery", "quarry", "lighthouse")
_HAY = (
    "The road to the {place} was quiet that morning. ",
    "Nobody at the {place} remembered the storm. ",
    "Rain fell on the {place} until the evening. ",
    "A cart stood in front of the {place} all day. ",
    "They painted the door of the {place} green. ",
)


@dataclass(frozen=True)
class NeedleCell:
    """One length and depth.

    Attributes:
        num_tokens: Tokens of the whole text, question included.
        depth: Where the needle stood, 0 to 1.
        accuracy: Share of answers whose every token was the likeliest.
        nats_with: Mean nats per answer token.
        nats_without: The same with the needle replaced by hay of as many tokens.
        is_beyond_window: In no text can the windows alone carry the needle to the question. Each
            layer hands on what stands up to `window - 1` tokens before, and the question's own
            tokens may read the needle for its last one, so it ends before the first token of the
            question less `num_layers * (window - 1)`. Never of a dense model, which sees all.
    """

    num_tokens: int
    depth: float
    accuracy: float
    nats_with: float
    nats_without: float
    num_trials: int
    is_beyond_window: bool

    @property
    def saved_nats(self) -> float:
        """What the needle is worth to the model; 0 if it does not use it."""
        return self.nats_without - self.nats_with


@dataclass(frozen=True)
class NeedleTable:
    """Cells by length, then depth."""

    cells: tuple[NeedleCell, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in ascending order."""
        return tuple(sorted({cell.num_tokens for cell in self.cells}))

    @property
    def depths(self) -> tuple[float, ...]:
        """Depths in ascending order."""
        return tuple(sorted({cell.depth for cell in self.cells}))

    def cell(self, num_tokens: int, depth: float) -> NeedleCell:
        """The cell of a length and depth."""
        for cell in self.cells:
            if (cell.num_tokens, cell.depth) == (num_tokens, depth):
                return cell
        raise KeyError((num_tokens, depth))

    def as_json(self) -> list[dict[str, Any]]:
        """The cells as plain values."""
        return [asdict(cell) | {"saved_nats": cell.saved_nats} for cell in self.cells]


@dataclass(frozen=True)
class NeedleText:
    """Ids of one text with the needle and of its twin without; both end with the answer.

    Attributes:
        num_question: Ids of the question, before the answer.
        num_answer: Ids of the answer, at the end.
    """

    with_needle: list[int]
    without: list[int]
    num_question: int
    num_answer: int
    needle_end: int

    def is_beyond(self, reach: int) -> bool:
        """No token of question or answer is within `reach` tokens after one of the needle."""
        question_start = len(self.with_needle) - self.num_answer - self.num_question
        return self.needle_end <= question_start - reach


def write_text(tokenizer: Tokenizer, num_tokens: int, depth: float, seed: int) -> NeedleText:
    """Write one text of exactly so many tokens; pure.

    Raises:
        ValueError: If needle and question alone are longer.
    """
    random = Random(seed)  # noqa: S311 - a test text, no secret
    place, number = random.choice(_PLACES), random.randrange(10_000, 100_000)
    question = _ids(tokenizer, f"\nThe number of the {place} is")
    needle = _ids(tokenizer, f"The number of the {place} is {number}. ")
    answer = _ids(tokenizer, f" {number}")
    room = num_tokens - len(question) - len(answer)
    if room < len(needle):
        needed = len(question) + len(answer) + len(needle)
        message = f"a needle text needs at least {needed} tokens, not {num_tokens}"
        raise ValueError(message)
    hay = _hay(tokenizer, room, random)
    begin = round(depth * (room - len(needle)))
    body = [*hay[:begin], *needle, *hay[begin + len(needle) :]]
    end = [*question, *answer]
    needle_end = begin + len(needle)
    return NeedleText([*body, *end], [*hay, *end], len(question), len(answer), needle_end)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text)]


def _hay(tokenizer: Tokenizer, num_tokens: int, random: Random) -> list[int]:
    ids: list[int] = []
    while len(ids) < num_tokens:
        sentence = random.choice(_HAY).format(place=random.choice(_PLACES))
        ids += _ids(tokenizer, sentence)
    return ids[:num_tokens]


def measure_needles(
    model: LanguageModel,
    tokenizer: Tokenizer,
    precision: Precision,
    *,
    lengths: Sequence[int],
    num_trials: int = 8,
    poll: Callable[[NeedleCell], None] = lambda _: None,
) -> NeedleTable:
    """Ask at every length and depth, with the same numbers and hay at each depth.

    The model is in eval mode. `poll` gets each cell, and may raise.
    """
    cells = []
    for num_tokens in lengths:
        for depth in DEPTHS:
            texts = [write_text(tokenizer, num_tokens, depth, seed) for seed in range(num_trials)]
            cells.append(_measure(model, texts, depth, precision))
            poll(cells[-1])
    return NeedleTable(tuple(cells))


def _measure(
    model: LanguageModel, texts: list[NeedleText], depth: float, precision: Precision
) -> NeedleCell:
    right, with_needle, without = zip(*_score(model, texts, precision), strict=True)
    config = model.config
    reach = config.num_layers * (config.nsa.window - 1)
    return NeedleCell(
        num_tokens=len(texts[0].with_needle),
        depth=depth,
        accuracy=sum(right) / len(right),
        nats_with=sum(with_needle) / len(right),
        nats_without=sum(without) / len(right),
        num_trials=len(texts),
        is_beyond_window=config.attention == "nsa" and all(text.is_beyond(reach) for text in texts),
    )


@torch.no_grad()
def _score(
    model: LanguageModel, texts: list[NeedleText], precision: Precision
) -> Iterator[tuple[bool, float, float]]:
    """Right or not, nats with the needle, nats without, for each text."""
    device = model.embedding.weight.device
    for text in texts:
        count = text.num_answer
        rows = torch.tensor([text.with_needle, text.without], device=device)
        with autocast(device, precision):
            hidden = model.hidden(rows[:, :-1]).view(2, rows.shape[1] - 1, -1)[:, -count:]
            logits = hidden @ model.head_weight.to(hidden.dtype).mT
        answer: Tensor = rows[0, -count:]
        nats = [F.cross_entropy(row.float(), answer).item() for row in logits]
        is_right = bool((logits[0].argmax(dim=-1) == answer).all())
        yield is_right, nats[0], nats[1]
