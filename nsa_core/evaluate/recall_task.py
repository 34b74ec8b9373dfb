"""Associative recall: keys with values early in a row, the same keys asked for at its end.

Every row draws its own values, so nothing can be learned by heart: a value is found where it stands
or not at all. Legend: B rows, T tokens of a row, P pairs, Q queries.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from nsa_core.config.nsa import NSAConfig
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.loss import IGNORED_TARGET
from nsa_core.model.transformer import LanguageModel


@dataclass(frozen=True)
class RecallTask:
    """Where pairs and queries stand: `margin` tokens, the pairs among fillers, `distance`, queries.

    Pairs stand in clusters, because a pair alone among fillers that mean nothing could be read off
    one compressed value: with several in each compressed block, only its own keys tell them apart.
    Ids are keys, then values, then fillers. A query is a key followed by its value, which is the
    target and is seen by later queries only, each of which asks for another key.

    Attributes:
        seq_len: T.
        num_clusters: Clusters at random places, none overlapping.
        cluster: Pairs of a cluster, each value right after its key.
        num_queries: Q of the pairs, in random order.
        margin: Fillers before the first cluster: block 0 is always selected.
        distance: Fillers between the last cluster and the first query.
        num_keys: Keys to draw the P different ones from.
        num_values: Values to draw from, with repetition.
        num_fillers: Tokens that mean nothing.
    """

    seq_len: int
    num_clusters: int
    cluster: int
    num_queries: int
    margin: int = 0
    distance: int = 0
    num_keys: int = 32
    num_values: int = 32
    num_fillers: int = 8

    def __post_init__(self) -> None:
        """Refuse a row that cannot hold its pairs."""
        if not 1 <= self.num_queries <= self.num_pairs <= self.num_keys:
            message = (
                f"a row needs 1 <= queries {self.num_queries} <= pairs {self.num_pairs} "
                f"<= keys {self.num_keys}"
            )
            raise ValueError(message)
        if self.num_places < self.num_clusters:
            message = (
                f"{self.seq_len} tokens have room for {self.num_places} of {self.num_clusters} "
                "clusters"
            )
            raise ValueError(message)

    def beyond(self, nsa: NSAConfig) -> Self:
        """The same rows with no pair in the window of a query or in an always selected block."""
        distance = max(nsa.window, 2 * nsa.select_block)
        return replace(self, margin=nsa.select_block, distance=distance)

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.num_clusters * self.cluster

    @property
    def vocab_size(self) -> int:
        """Keys, values and fillers."""
        return self.num_keys + self.num_values + self.num_fillers

    @property
    def first_query(self) -> int:
        """Position of the first key that is asked for."""
        return self.seq_len - 2 * self.num_queries

    @property
    def num_places(self) -> int:
        """Places of a cluster."""
        return (self.first_query - self.distance - self.margin) // (2 * self.cluster)

    def is_beyond(self, geometry: BlockGeometry) -> bool:
        """No query can see a pair but through the compressed branch or a free choice of blocks."""
        last_pair = self.first_query - self.distance - 1
        block = geometry.select_block
        return (
            self.first_query - last_pair >= geometry.window
            and self.margin >= block
            and self.first_query // block - last_pair // block >= 2
        )


@dataclass(frozen=True, eq=False)
class RecallBatch:
    """Tokens [B, T] and targets [B, T]: the value where a query's key stands, else -1."""

    tokens_BT: Tensor
    targets_BT: Tensor


def draw_recall(task: RecallTask, batch: int, generator: torch.Generator) -> RecallBatch:
    """Fresh rows on the CPU; the generator decides them."""

    def choose(of: int, count: int) -> Tensor:
        return torch.rand(batch, of, generator=generator).argsort(dim=-1)[:, :count]

    first_filler = task.num_keys + task.num_values
    tokens_BT = torch.randint(
        first_filler, task.vocab_size, (batch, task.seq_len), generator=generator
    )
    keys_BP = choose(task.num_keys, task.num_pairs)
    shape = (batch, task.num_pairs)
    values_BP = torch.randint(task.num_keys, first_filler, shape, generator=generator)
    places_BC = choose(task.num_places, task.num_clusters)
    within = torch.arange(task.cluster).repeat(task.num_clusters)
    place_BP = 2 * (places_BC.repeat_interleave(task.cluster, dim=1) * task.cluster + within)
    place_BP += task.margin
    tokens_BT.scatter_(1, place_BP, keys_BP).scatter_(1, place_BP + 1, values_BP)
    asked_BQ = choose(task.num_pairs, task.num_queries)
    first_query = task.first_query
    tokens_BT[:, first_query::2] = keys_BP.gather(1, asked_BQ)
    tokens_BT[:, first_query + 1 :: 2] = values_BP.gather(1, asked_BQ)
    targets_BT = torch.full_like(tokens_BT, IGNORED_TARGET)
    targets_BT[:, first_query::2] = tokens_BT[:, first_query + 1 :: 2]
    return RecallBatch(tokens_BT, targets_BT)


@torch.no_grad()
def recall_accuracy(
    model: LanguageModel, task: RecallTask, *, rows: int, batch: int = 8, seed: int = 10**6
) -> float:
    """Share of the queries whose likeliest next token is the value; chance is 1 / num_values.

    Args:
        model: With at least `task.vocab_size` ids, under the caller's autocast.
        task: Which rows.
        rows: How many, each with `task.num_queries` queries.
        batch: Rows of one pass.
        seed: Of the rows; keep it apart from the seed of training.
    """
    generator = torch.Generator().manual_seed(seed)
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
