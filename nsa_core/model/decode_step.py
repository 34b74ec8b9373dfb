"""One new token for every cached sequence, computed from tensors alone.

The host decides nothing here: no value is read back, no shape depends on a position, no buffer is
made anew. So one CUDA graph of `decode_step` serves every position (decode_loop.py), and sequences
may stand at different positions. `decode.extend` does the same for many tokens at once.
Legend: B sequences, W model width, H heads, G groups, D key width, E value width, l tokens of a
compressed block.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nsa_core.kernels.decode import (
    CachedPairs,
    CountedReads,
    DecodeAttention,
    attend_one,
    by_group,
)
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.attention import DenseAttention, KeysValues, NSAAttention
from nsa_core.model.cache import DecodeCache, DenseLayerCache, NSALayerCache, PairBuffer
from nsa_core.model.cached_layers import CachedPass
from nsa_core.model.decode import LayerReads
from nsa_core.model.rotary import Rotary, rotate
from nsa_core.model.transformer import LanguageModel


@dataclass(frozen=True, eq=False)
class TokenStep:
    """What one step computed; a replay of its graph computes it anew in the same memory.

    Attributes:
        logits_BV: For the next token.
        hidden_BW: Hidden states after the last norm.
        ids: Chosen blocks [B, G, S] of each NSA layer.
        counted: Keys read in each layer.
    """

    logits_BV: Tensor
    hidden_BW: Tensor
    ids: tuple[Tensor, ...]
    counted: tuple[CountedReads, ...]

    def reads(self) -> tuple[LayerReads, ...]:
        """Keys read in each layer, [B, 1] each, as `extend` counts them."""
        return tuple(
            LayerReads(*(total_B.unsqueeze(1) for total_B in counted.totals()))
            for counted in self.counted
        )


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the new tokens stand, and what all layers derive from it."""

    position_B: Tensor
    tables: tuple[Tensor, Tensor]
    block_B: Tensor
    block_tables: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, position_B: Tensor, rotary: Rotary, geometry: BlockGeometry) -> "_Place":
        stride = geometry.compress_stride
        block_B = ((position_B - geometry.compress_block) // stride + 1).clamp(min=0)
        return cls(position_B, rotary.tables(position_B), block_B, rotary.tables(block_B * stride))


@torch.no_grad()
def decode_step(
    model: LanguageModel,
    cache: DecodeCache,
    token_B: Tensor,
    position_B: Tensor,
    attend: DecodeAttention,
) -> TokenStep:
    """Write one token of every sequence to the caches and compute the logits after it.

    The caller keeps `cache.length`, and keeps every position below the capacity.

    Args:
        model: In any mode; no gradient is kept.
        cache: Holds the tokens before these positions.
        token_B: New ids.
        position_B: int64, where each of them stands in its sequence.
        attend: Attention of the NSA layers.
    """
    place = _Place.of(position_B, model.rotary, model.geometry)
    steps = CachedPass(
        partial(_step_nsa, place=place, geometry=model.geometry, attend=attend),
        partial(_step_dense, place=place),
    )
    hidden_BW = steps.run(model, cache, token_B)
    logits_BV = nn.functional.linear(hidden_BW, model.head_weight)
    return TokenStep(logits_BV, hidden_BW, tuple(steps.ids), tuple(steps.reads))


def _step_nsa(
    attention: NSAAttention,
    x_BW: Tensor,
    layer: NSALayerCache,
    place: _Place,
    geometry: BlockGeometry,
    attend: DecodeAttention,
) -> tuple[Tensor, Tensor, CountedReads]:
    projected = attention.project(x_BW, has_few_rows=True)
    pairs, q_BHD = projected.pairs, rotate(projected.q_NHD, place.tables)
    position_B, window = place.position_B, layer.window
    layer.selected.write_one(position_B, rotate(pairs.k_slc, place.tables), pairs.v_slc)
    window.write_one(position_B % window.k.shape[1], rotate(pairs.k_win, place.tables), pairs.v_win)
    _compress_last(attention, pairs, layer, place, geometry)
    cached = CachedPairs(*((pair.k, pair.v) for pair in (layer.compressed, layer.selected, window)))
    gate_BH3 = attention.gate(x_BW, projected.gate_NY)
    found = attend.attend(q_BHD, cached, gate_BH3, position_B, geometry)
    out_BW: Tensor = attention.out(found.out_BHE.flatten(1))
    return out_BW, found.ids_BGS, found.counted


def _compress_last(
    attention: NSAAttention,
    pairs: KeysValues,
    layer: NSALayerCache,
    place: _Place,
    geometry: BlockGeometry,
) -> None:
    """Compress the last l tokens at every step, into the row of the block that is not complete.

    A row is visible from the token on that completes its block, and that token overwrites what
    the tokens before it left there.
    """
    ring = layer.tail.k.shape[1]
    layer.tail.write_one(place.position_B % ring, pairs.k_cmp, pairs.v_cmp)
    age_l = torch.arange(geometry.compress_block - 1, -1, -1, device=place.position_B.device)
    raw_k, raw_v = layer.tail.take((place.position_B[:, None] - age_l) % ring)
    k_new = rotate(attention.phi_k(raw_k.to(pairs.k_cmp.dtype)), place.block_tables)
    v_new = attention.phi_v(raw_v.to(pairs.v_cmp.dtype))
    layer.compressed.write_one(place.block_B, k_new, v_new)


def _step_dense(
    attention: DenseAttention, x_BW: Tensor, layer: DenseLayerCache, place: _Place
) -> tuple[Tensor, CountedReads]:
    q_BHD, k_BGD, v_BGE = attention.project(x_BW)
    pair: PairBuffer = layer.pair
    pair.write_one(place.position_B, rotate(k_BGD, place.tables), v_BGE)
    row_R = torch.arange(pair.k.shape[1], device=x_BW.device)
    sees_B1R = (row_R <= place.position_B[:, None]).unsqueeze(1)
    out_BHE, _ = attend_one(rotate(q_BHD, place.tables), by_group((pair.k, pair.v)), sees_B1R)
    nothing = sees_B1R[..., :0]
    out_BW: Tensor = attention.out(out_BHE.flatten(1))
    return out_BW, CountedReads(nothing, sees_B1R, nothing)
