"""Attention of one new token per sequence to its caches, without asking the host for anything.

Every size comes from the buffers and every position from a tensor, so one captured CUDA graph
serves all positions. Legend: B sequences, H query heads, G groups, h = H / G, D key width, E value
width, R rows of a buffer, C rows of the compressed one, S = num_selected, L tokens of a selection
block.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nsa_core.kernels.gathered import (
    FiniteKeys,
    attend_tiles,
    attention_probabilities,
    wide_dtype,
)
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.mixing import gated_sum
from nsa_core.kernels.selection import choose_blocks, select_scores

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class CachedPairs:
    """Keys [B, R, G, D] and values [B, R, G, E] of the branches, the new token's included.

    Attributes:
        compressed: Compressed block i in row i; rows of blocks that are not complete hold anything
            finite.
        selected: The token at position p in row p.
        sliding: The token at position p in row p % R; R is at least the window.
    """

    compressed: Pair
    selected: Pair
    sliding: Pair


@dataclass(frozen=True, eq=False)
class CountedReads:
    """Keys that the new token read.

    Each is [B, G or 1, parts]: booleans, which keys the mask showed (`GatheredDecode`), or counts
    of the keys that each program loaded (Triton).
    """

    compressed: Tensor
    selected: Tensor
    sliding: Tensor

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """(compressed, selected, sliding) keys of a group (all read the same number): [B]."""
        compressed, selected, sliding = (
            part.sum(dim=-1).amax(dim=-1) for part in (self.compressed, self.selected, self.sliding)
        )
        return compressed, selected, sliding


@dataclass(frozen=True, eq=False)
class DecodedToken:
    """One layer's attention for one token of every sequence.

    Attributes:
        out_BHE: Gated sum of the branches, in the dtype of q.
        ids_BGS: Chosen blocks, int32, ascending, -1 as padding at the end.
        counted: Keys read.
    """

    out_BHE: Tensor
    ids_BGS: Tensor
    counted: CountedReads


class DecodeAttention(Protocol):
    """All three branches, the choice of blocks and the gated sum for one token per sequence."""

    @property
    def name(self) -> str:
        """Name of these kernels, as the run records it."""
        ...

    def attend(
        self,
        q_BHD: Tensor,
        pairs: CachedPairs,
        gate_BH3: Tensor,
        position_B: Tensor,
        geometry: BlockGeometry,
    ) -> DecodedToken:
        """Attend from the tokens at these positions (int64, on the device, any for each sequence).

        Raises:
            ValueError: If the shapes are none that it serves.
        """
        ...


class GatheredDecode:
    """Plain PyTorch on whole buffers: runs everywhere, in any dtype.

    It gathers the chosen blocks and touches every row of the two other buffers, all under masks. So
    its `CountedReads` say what the token may see, not what moved through memory.
    """

    name = "gathered"

    def attend(
        self,
        q_BHD: Tensor,
        pairs: CachedPairs,
        gate_BH3: Tensor,
        position_B: Tensor,
        geometry: BlockGeometry,
    ) -> DecodedToken:
        """See `DecodeAttention.attend`."""
        sees_cmp_B1C = _complete_blocks(pairs.compressed[0], position_B, geometry)
        out_cmp, ids_BGS = _attend_and_choose(q_BHD, pairs, sees_cmp_B1C, position_B, geometry)
        row_BGR = _chosen_rows(ids_BGS, geometry.select_block)
        sees_slc_BGR = (row_BGR >= 0) & (row_BGR <= position_B[:, None, None])
        chosen = _take_rows(pairs.selected, row_BGR.clamp(0, pairs.selected[0].shape[1] - 1))
        out_slc, _ = attend_one(q_BHD, chosen, sees_slc_BGR)
        sees_win_B1R = _window_rows(pairs.sliding[0], position_B, geometry.window)
        out_win, _ = attend_one(q_BHD, by_group(pairs.sliding), sees_win_B1R)
        return DecodedToken(
            gated_sum(gate_BH3, (out_cmp, out_slc, out_win)),
            ids_BGS,
            CountedReads(sees_cmp_B1C, sees_slc_BGR, sees_win_B1R),
        )


def by_group(pair: Pair) -> Pair:
    """Buffers [B, R, G, .] as [B, G, R, .], not copied."""
    return pair[0].transpose(1, 2), pair[1].transpose(1, 2)


def attend_one(q_BHD: Tensor, pair: Pair, is_visible_BGR: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to keys [B, G, R, D] and values [B, G, R, E].

    Returns:
        out_BHE in the dtype of q, and lse [B, G, 1, h] in `wide_dtype`.
    """
    q_BG1hD, wide = _tiles(q_BHD, pair[0].shape[1]), wide_dtype(q_BHD.dtype)
    keys = FiniteKeys.of(*(x.to(wide) for x in pair))
    with torch.autocast(q_BHD.device.type, enabled=False):
        out_BG1hE, lse_BG1h = attend_tiles(q_BG1hD, keys, is_visible_BGR.unsqueeze(2))
    return out_BG1hE.flatten(1, 3).to(q_BHD.dtype), lse_BG1h


def _tiles(q_BHD: Tensor, num_groups: int) -> Tensor:
    batch, heads, width = q_BHD.shape
    shape = (batch, num_groups, 1, heads // num_groups, width)
    return q_BHD.reshape(shape).to(wide_dtype(q_BHD.dtype))


def _complete_blocks(k_BCGD: Tensor, position_B: Tensor, geometry: BlockGeometry) -> Tensor:
    last_C = torch.arange(k_BCGD.shape[1], device=k_BCGD.device) * geometry.compress_stride
    return (last_C + (geometry.compress_block - 1) <= position_B[:, None]).unsqueeze(1)


def _attend_and_choose(
    q_BHD: Tensor,
    pairs: CachedPairs,
    sees_B1C: Tensor,
    position_B: Tensor,
    geometry: BlockGeometry,
) -> tuple[Tensor, Tensor]:
    k_BGCD, v_BGCE = by_group(pairs.compressed)
    out_BHE, lse_BG1h = attend_one(q_BHD, (k_BGCD, v_BGCE), sees_B1C)
    q_BG1hD = _tiles(q_BHD, k_BGCD.shape[1])
    keys = FiniteKeys.of_keys(k_BGCD.to(q_BG1hD.dtype))
    with torch.autocast(q_BHD.device.type, enabled=False):
        prob_BG1hC = attention_probabilities(q_BG1hD, keys, sees_B1C.unsqueeze(2), lse_BG1h)
    num_blocks = geometry.num_select_blocks(pairs.selected[0].shape[1])
    score_BGJ = select_scores(prob_BG1hC.sum(dim=3).squeeze(2), num_blocks, geometry)
    return out_BHE, choose_blocks(score_BGJ, position_B, geometry)


def _chosen_rows(ids_BGS: Tensor, select_block: int) -> Tensor:
    """Positions of the keys of the chosen blocks, negative for padding: [B, G, S * L]."""
    offsets_L = torch.arange(select_block, device=ids_BGS.device)
    return (ids_BGS.long().unsqueeze(-1) * select_block + offsets_L).flatten(2)


def _take_rows(pair: Pair, row_BGR: Tensor) -> Pair:
    k_BGRD, v_BGRE = (
        x.gather(2, row_BGR.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for x in by_group(pair)
    )
    return k_BGRD, v_BGRE


def _window_rows(k_BRGD: Tensor, position_B: Tensor, window: int) -> Tensor:
    """Which rows of the ring hold one of the last `window` tokens: [B, 1, R]."""
    ring = k_BRGD.shape[1]
    newest_B1 = position_B[:, None]
    age_BR = (newest_B1 - torch.arange(ring, device=k_BRGD.device)) % ring
    return ((age_BR < window) & (age_BR <= newest_B1)).unsqueeze(1)
