"""Which cached rows the new tokens of each sequence read, and how many that were.

Legend: B sequences, m new tokens of each, N = B * m, G groups, S = num_selected, P tiles, Q queries
of a tile, R keys of a tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.kernels.gathered import TileKeys
from nsa_core.kernels.geometry import BlockGeometry


@dataclass(frozen=True)
class Positions:
    """Where the new tokens stand: positions first .. last - 1 of every sequence."""

    first: int
    last: int
    batch: int
    device: torch.device

    @property
    def count(self) -> int:
        """New tokens of a sequence."""
        return self.last - self.first

    def new(self) -> Tensor:
        """int64 [m]."""
        return torch.arange(self.first, self.last, device=self.device)

    def of_all_sequences(self) -> Tensor:
        """int64 [B * m]."""
        return self.new().repeat(self.batch)


class CachedPlan:
    """A tile plan over a buffer [B, rows]: one tile a sequence, the same rows for all groups."""

    def __init__(self, row_R: Tensor, is_visible_mR: Tensor, buffer_rows: int) -> None:
        """Let every sequence read `row_R` under one mask."""
        self.row_R, self.is_visible_mR, self.buffer_rows = row_R, is_visible_mR, buffer_rows

    @property
    def queries(self) -> int:
        """All new tokens of a sequence."""
        return self.is_visible_mR.shape[0]

    @property
    def keys(self) -> int:
        """Rows read."""
        return self.row_R.shape[0]

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """See `TilePlan.tile_keys`."""
        sequence_P11 = torch.arange(first, last, device=self.row_R.device)[:, None, None]
        group_G1 = torch.arange(num_groups, device=self.row_R.device)[:, None]
        row_PGR = (sequence_P11 * self.buffer_rows + self.row_R) * num_groups + group_G1
        is_visible = self.is_visible_mR.expand(last - first, 1, -1, -1)
        return TileKeys(row_PGR, is_visible)

    def reads(self, batch: int) -> Tensor:
        """Keys each new token reads: [B, m]."""
        return self.is_visible_mR.sum(dim=-1).expand(batch, -1)


class CachedBlocksPlan:
    """A tile plan over the chosen blocks: one tile a token, other rows for each group."""

    queries = 1

    def __init__(
        self, ids_BmGS: Tensor, positions: Positions, geometry: BlockGeometry, buffer_rows: int
    ) -> None:
        """Gather the chosen blocks; a single token gathers exactly what it may see."""
        self.buffer_rows = buffer_rows
        offsets = torch.arange(geometry.select_block, device=ids_BmGS.device)
        first_BmGS1 = ids_BmGS.long().unsqueeze(-1) * geometry.select_block
        position_BmGR = (first_BmGS1 + offsets).flatten(3)
        if positions.count == 1:
            position_BmGR = position_BmGR[..., : _visible_chosen(positions.first, geometry)]
        newest_m11 = positions.new()[:, None, None]
        is_visible_BmGR = (position_BmGR >= 0) & (position_BmGR <= newest_m11)
        self.position_NGR = position_BmGR.flatten(0, 1)
        self.is_visible_NGR = is_visible_BmGR.flatten(0, 1)
        self.tokens_per_sequence = positions.count

    @property
    def keys(self) -> int:
        """Rows read."""
        return self.position_NGR.shape[-1]

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """See `TilePlan.tile_keys`."""
        token_P = torch.arange(first, last, device=self.position_NGR.device)
        sequence_P11 = (token_P // self.tokens_per_sequence)[:, None, None]
        group_G1 = torch.arange(num_groups, device=token_P.device)[:, None]
        row_PGR = sequence_P11 * self.buffer_rows + self.position_NGR[first:last].clamp(
            0, self.buffer_rows - 1
        )
        return TileKeys(
            row_PGR * num_groups + group_G1, self.is_visible_NGR[first:last].unsqueeze(2)
        )

    def reads(self, batch: int) -> Tensor:
        """Keys each new token reads in a group (the same number in all): [B, m]."""
        return self.is_visible_NGR.sum(dim=-1).amax(dim=-1).view(batch, -1)


def _visible_chosen(position: int, geometry: BlockGeometry) -> int:
    """Keys of the chosen blocks up to a token: its own block is the last and is cut."""
    whole = (geometry.num_chosen(position) - 1) * geometry.select_block
    return whole + position % geometry.select_block + 1
