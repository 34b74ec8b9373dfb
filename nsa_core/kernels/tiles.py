"""The tile plans of the three branches: which keys a tile of queries reads and which each sees.

Legend: N tokens, G groups, P tiles, Q queries of a tile, R keys of a tile, S = num_selected,
J selection blocks of the longest document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.kernels.gathered import TileKeys
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing

#: Queries of a tile whose keys reach back to the start of the document.
LONG_TILE = 256


def document_tile(packing: Packing) -> tuple[int, int]:
    """Queries of a tile, and how many rows before its first query a document may begin.

    Equal documents of at most `LONG_TILE` tokens are their own tiles and need no look back.
    """
    length = packing.uniform_length
    if length is not None and length <= LONG_TILE:
        return length, 0
    return min(LONG_TILE, packing.num_tokens), packing.max_seqlen - 1


def query_rows(first: int, last: int, queries: int, packing: Packing) -> Tensor:
    """int64 [P, Q]: the row of each query; rows after the last token repeat it."""
    rows = torch.arange(first * queries, last * queries, device=packing.start_N.device)
    return rows.clamp_(max=packing.num_tokens - 1).view(-1, queries)


def _range_rows(first_P: Tensor, count: int) -> Tensor:
    return first_P[:, None] + torch.arange(count, device=first_P.device)


def _per_group(row_PR: Tensor, num_rows: int, num_groups: int) -> Tensor:
    """int64 [P, G, R]: rows of [K, G] flattened; rows outside 0 .. K - 1 are moved inside."""
    groups = torch.arange(num_groups, device=row_PR.device)
    return row_PR.clamp(0, num_rows - 1)[:, None, :] * num_groups + groups[:, None]


@dataclass(frozen=True)
class SlidingPlan:
    """Keys t - w + 1 .. t of the document, in tiles about as long as the window."""

    window: int
    packing: Packing

    @property
    def queries(self) -> int:
        """About w, so that a tile reads about twice what a query sees."""
        return min(max(self._reach, 32), LONG_TILE, self.packing.num_tokens)

    @property
    def _reach(self) -> int:
        return min(self.window, self.packing.max_seqlen)

    @property
    def keys(self) -> int:
        """The tile itself and the window before its first query."""
        return self.queries + self._reach - 1

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """See `TilePlan.tile_keys`."""
        query_PQ1 = query_rows(first, last, self.queries, self.packing).unsqueeze(-1)
        start_PQ1 = self.packing.start_N[query_PQ1]
        key_PR = _range_rows(self._first_rows(first, last), self.keys)
        key_P1R = key_PR.unsqueeze(1)
        oldest_PQ1 = torch.maximum(start_PQ1, query_PQ1 - self.window + 1)
        is_visible_PQR = (key_P1R <= query_PQ1) & (key_P1R >= oldest_PQ1)
        rows_PGR = _per_group(key_PR, self.packing.num_tokens, num_groups)
        return TileKeys(rows_PGR, is_visible_PQR.unsqueeze(1))

    def _first_rows(self, first: int, last: int) -> Tensor:
        tiles = torch.arange(first, last, device=self.packing.start_N.device)
        return tiles * self.queries - self._reach + 1


@dataclass(frozen=True)
class CompressedPlan:
    """The compressed blocks of the document that end at or before each query."""

    geometry: BlockGeometry
    packing: Packing

    @property
    def queries(self) -> int:
        """A whole short document, or a fixed number of queries."""
        return document_tile(self.packing)[0]

    @property
    def keys(self) -> int:
        """Slots from the earliest document that reaches into the tile to the end of the tile."""
        queries, lookback = document_tile(self.packing)
        return (queries - 1 + lookback) // self.geometry.compress_stride + 2

    def first_slots(self, first: int, last: int) -> Tensor:
        """int64 [P]: the first slot each tile reads; may be negative."""
        queries, lookback = document_tile(self.packing)
        tiles = torch.arange(first, last, device=self.packing.start_N.device)
        return (tiles * queries - lookback) // self.geometry.compress_stride

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """See `TilePlan.tile_keys`."""
        sizes = self.geometry
        query_PQ1 = query_rows(first, last, self.queries, self.packing).unsqueeze(-1)
        start_PQ1, position_PQ1 = (
            self.packing.start_N[query_PQ1],
            self.packing.position_N[query_PQ1],
        )
        slot_PR = _range_rows(self.first_slots(first, last), self.keys)
        block_PQR = slot_PR.unsqueeze(1) - start_PQ1 // sizes.compress_stride
        last_PQR = block_PQR * sizes.compress_stride + sizes.compress_block - 1
        is_visible_PQR = (block_PQR >= 0) & (last_PQR <= position_PQ1)
        num_slots = sizes.num_slots(self.packing.num_tokens)
        return TileKeys(_per_group(slot_PR, num_slots, num_groups), is_visible_PQR.unsqueeze(1))


@dataclass(frozen=True)
class ChosenBlocksPlan:
    """The keys of the chosen blocks, gathered for each token: work linear in N."""

    geometry: BlockGeometry
    packing: Packing
    ids_NGS: Tensor

    queries: int = 1

    @property
    def keys(self) -> int:
        """num_selected whole blocks."""
        return self.geometry.num_selected * self.geometry.select_block

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """See `TilePlan.tile_keys`."""
        block, rows = self.geometry.select_block, slice(first, last)
        offsets = torch.arange(block, device=self.ids_NGS.device)
        ids_PGS1 = self.ids_NGS[rows].long().unsqueeze(-1)
        position_PGR = (ids_PGS1 * block + offsets).flatten(2)
        is_visible_PGR = (position_PGR >= 0) & (
            position_PGR <= self.packing.position_N[rows, None, None]
        )
        row_PGR = position_PGR + self.packing.start_N[rows, None, None]
        groups_G1 = torch.arange(num_groups, device=row_PGR.device).unsqueeze(-1)
        inside_PGR = row_PGR.clamp(0, self.packing.num_tokens - 1)
        return TileKeys(inside_PGR * num_groups + groups_G1, is_visible_PGR.unsqueeze(2))


@dataclass(frozen=True)
class ChosenMaskPlan:
    """All keys of the document under a mask of chosen blocks: cheaper while documents are short."""

    geometry: BlockGeometry
    packing: Packing
    ids_NGS: Tensor

    @property
    def queries(self) -> int:
        """A whole short document, or a fixed number of queries."""
        return document_tile(self.packing)[0]

    @property
    def keys(self) -> int:
        """Rows from the earliest document that reaches into the tile to the end of the tile."""
        queries, lookback = document_tile(self.packing)
        return queries + lookback

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """See `TilePlan.tile_keys`."""
        query_PQ = query_rows(first, last, self.queries, self.packing)
        _, lookback = document_tile(self.packing)
        tiles = torch.arange(first, last, device=query_PQ.device)
        key_PR = _range_rows(tiles * self.queries - lookback, self.keys)
        position_PQR = key_PR.unsqueeze(1) - self.packing.start_N[query_PQ].unsqueeze(-1)
        is_past_PQR = (position_PQR >= 0) & (
            position_PQR <= self.packing.position_N[query_PQ].unsqueeze(-1)
        )
        is_chosen_PGQJ = self._chosen(query_PQ).transpose(1, 2)
        last_block = is_chosen_PGQJ.shape[-1] - 1
        block_PQR = (position_PQR // self.geometry.select_block).clamp(0, last_block)
        block_PGQR = block_PQR.unsqueeze(1).expand(-1, num_groups, -1, -1)
        is_visible_PGQR = is_chosen_PGQJ.gather(-1, block_PGQR) & is_past_PQR.unsqueeze(1)
        return TileKeys(_per_group(key_PR, self.packing.num_tokens, num_groups), is_visible_PGQR)

    def _chosen(self, query_PQ: Tensor) -> Tensor:
        """Bool [P, Q, G, J]: which blocks each query chose; padding lands in a column cut off."""
        num_blocks = self.geometry.num_select_blocks(self.packing.max_seqlen)
        ids_PQGS = self.ids_NGS[query_PQ].long()
        is_chosen = torch.zeros(
            *ids_PQGS.shape[:3], num_blocks + 1, dtype=torch.bool, device=ids_PQGS.device
        )
        column_PQGS = torch.where(ids_PQGS < 0, num_blocks, ids_PQGS)
        return is_chosen.scatter_(-1, column_PQGS, 1)[..., :num_blocks]
