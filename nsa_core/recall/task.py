"""Associative recall: pairs of a key and a value early in a row, some of the keys alone at its end.

    margin | blocks, some of them with pairs among fillers | distance | keys that are asked for

Every row draws its own pairs, so nothing can be learned by heart: the model has to find a value in
the row. Legend: B rows, T tokens of a row, F filled blocks, P pairs, Q queries.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from nsa_core.config.model import NSAConfig
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.loss import IGNORED_TARGET
from nsa_core.model.transformer import LanguageModel

#: Of the rows that a model is judged by; a recipe may not train with it.
JUDGED_SEED = 10**6


@dataclass(frozen=True)
class RecallTask:
    """Where pairs and queries stand.

    Ids are keys, then values, then fillers. In a pair the value follows its key. A query is a key
    alone; its target is the value, which the row does not show again. No key is in two pairs
    and none is asked for twice.

    Attributes:
        block: Tokens of a block, even.
        num_blocks: Blocks between margin and distance.
        num_filled: Blocks that hold pairs, chosen at random; the others hold fillers.
        num_queries: Q of the P pairs are asked for, in random order.
        pairs: Different pairs of a filled block, at random even places.
        repeats: How often each of them occurs in its block; above 1 the lesson is easier, because
            the mean over the block is more like the pair.
        margin: Fillers before the first block.
        distance: Fillers between the last block and the first query.
        num_keys: Keys to draw the P different ones from.
    """

    block: int
    num_blocks: int
    num_filled: int
    num_queries: int
    pairs: int = 1
    repeats: int = 1
    margin: int = 0
    distance: int = 0
    num_keys: int = 16
    num_values: int = 16
    num_fillers: int = 4

    def __post_init__(self) -> None:
        """Refuse rows that cannot be drawn.

        Raises:
            ValueError: If there are too few keys, pairs, blocks or places.
        """
        if not 1 <= self.num_queries <= self.num_pairs <= self.num_keys:
            message = (
                f"a row needs 1 <= queries {self.num_queries} <= pairs {self.num_pairs} "
                f"<= keys {self.num_keys}"
            )
            raise ValueError(message)
        if self.num_filled > self.num_blocks:
            message = f"{self.num_filled} of {self.num_blocks} blocks cannot hold pairs"
            raise ValueError(message)
        if self.block % 2 or self.pairs * self.repeats > self.block // 2:
            message = (
                f"a block of {self.block} tokens must be even and hold "
                f"{self.pairs} x {self.repeats} pairs of two tokens"
            )
            raise ValueError(message)

    def beyond(self, nsa: NSAConfig) -> Self:
        """The same rows with no pair in a query's window or always selected blocks in one layer.

        `is_beyond` tells whether that is still so through all layers of a model.
        """
        distance = max(nsa.window, 2 * nsa.select_block)
        return replace(self, margin=nsa.select_block, distance=distance)

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.num_filled * self.pairs

    @property
    def vocab_size(self) -> int:
        """Keys, values and fillers."""
        return self.num_keys + self.num_values + self.num_fillers

    @property
    def first_query(self) -> int:
        """Position of the first key that is asked for."""
        return self.margin + self.num_blocks * self.block + self.distance

    @property
    def seq_len(self) -> int:
        """T."""
        return self.first_query + self.num_queries

    def is_beyond(self, geometry: BlockGeometry, num_layers: int) -> bool:
        """No pair reaches a query but through the compressed branch or a free choice of blocks.

        A token of one layer reads what its window and its always selected blocks hold, and hands it
        on in the next, so the first query, which is nearest, looks back once for each layer.
        """
        position, block = self.first_query, geometry.select_block
        for _ in range(num_layers):
            position = min(position - geometry.window + 1, (position // block - 1) * block)
        last_pair = self.first_query - self.distance - 1
        return self.margin >= block and last_pair < position

    def has_to_choose(self, geometry: BlockGeometry) -> bool:
        """A query can select at most a third of the blocks that hold pairs, wherever it looks.

        Each filled block is one selection block, so covering them at random finds no more.
        """
        free = geometry.num_selected - len(geometry.forced_blocks(self.first_query))
        is_aligned = self.block == geometry.select_block and self.margin % self.block == 0
        return is_aligned and 3 * free <= self.num_filled


@dataclass(frozen=True, eq=False)
class RecallBatch:
    """Tokens [B, T] and targets [B, T]: the value at the key of a query, else -1."""

    tokens_BT: Tensor
    targets_BT: Tensor


def draw_recall(task: RecallTask, batch: int, generator: torch.Generator) -> RecallBatch:
    """Fresh rows on the CPU; the generator decides them."""
    first_filler = task.num_keys + task.num_values
    tokens_BT = torch.randint(
        first_filler, task.vocab_size, (batch, task.seq_len), generator=generator
    )
    keys_BP = _choose(task.num_keys, task.num_pairs, (batch,), generator)
    values_BP = torch.randint(task.num_keys, first_filler, keys_BP.shape, generator=generator)
    place_BX = _draw_places(task, batch, generator)
    tokens_BT.scatter_(1, place_BX, keys_BP.repeat_interleave(task.repeats, dim=1))
    tokens_BT.scatter_(1, place_BX + 1, values_BP.repeat_interleave(task.repeats, dim=1))
    asked_BQ = _choose(task.num_pairs, task.num_queries, (batch,), generator)
    tokens_BT[:, task.first_query :] = keys_BP.gather(1, asked_BQ)
    targets_BT = torch.full_like(tokens_BT, IGNORED_TARGET)
    targets_BT[:, task.first_query :] = values_BP.gather(1, asked_BQ)
    return RecallBatch(tokens_BT, targets_BT)


def _draw_places(task: RecallTask, batch: int, generator: torch.Generator) -> Tensor:
    """Positions [B, P * repeats] of the keys; the repeats of a pair follow each other."""
    block_BF = _choose(task.num_blocks, task.num_filled, (batch,), generator)
    shape = (batch, task.num_filled)
    slot_BFX = _choose(task.block // 2, task.pairs * task.repeats, shape, generator)
    return (task.margin + task.block * block_BF.unsqueeze(-1) + 2 * slot_BFX).flatten(1)


def _choose(of: int, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """`count` different numbers below `of`, in random order: [*shape, count]."""
    return torch.rand(*shape, of, generator=generator).argsort(dim=-1)[..., :count]


@torch.no_grad()
def recall_accuracy(model: LanguageModel, task: RecallTask, *, rows: int, batch: int = 8) -> float:
    """Share of the queries whose likeliest next token is the value; chance is 1 / num_values."""
    generator = torch.Generator().manual_seed(JUDGED_SEED)
    device = model.embedding.weight.device
    num_right = num_asked = 0
    for first in range(0, rows, batch):
        drawn = draw_recall(task, min(batch, rows - first), generator)
        is_target_BT = drawn.targets_BT >= 0
        hidden_NW = model.hidden(drawn.tokens_BT.to(device))
        asked_QW = hidden_NW[is_target_BT.flatten().to(device)]
        answer_Q = (asked_QW @ model.head_weight.to(asked_QW.dtype).mT).argmax(dim=-1).cpu()
        num_right += int((answer_Q == drawn.targets_BT[is_target_BT]).sum())
        num_asked += len(answer_Q)
    return num_right / num_asked
