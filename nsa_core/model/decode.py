"""Extend cached sequences by new tokens: prefill in chunks and decode are one function.

Legend: B sequences, m new tokens of each, N = B * m, W model width, H heads, G groups, h = H / G,
D key width, E value width, C compressed blocks, J selection blocks, S = num_selected, R keys a
query reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from nsa_core.kernels.gathered import (
    FiniteKeys,
    attention_probabilities,
    gathered_attention,
    to_tiles,
    wide_dtype,
)
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.selection import choose_blocks, select_scores
from nsa_core.model.attention import DenseAttention, KeysValues, NSAAttention
from nsa_core.model.cache import DecodeCache, DenseLayerCache, LayerCache, NSALayerCache, PairBuffer
from nsa_core.model.decode_plans import CachedBlocksPlan, CachedPlan, Positions
from nsa_core.model.rotary import Rotary, rotate
from nsa_core.model.transformer import Block, LanguageModel, check_tokens

Reads = TypeVar("Reads")
#: A layer, its normed input [N, W] and its cache in; what it adds [N, W], its chosen blocks and the
#: keys it read out.
AttendNSA = Callable[[NSAAttention, Tensor, NSALayerCache], tuple[Tensor, Tensor, Reads]]
#: As `AttendNSA`, without blocks.
AttendDense = Callable[[DenseAttention, Tensor, DenseLayerCache], tuple[Tensor, Reads]]


@dataclass(eq=False)
class CachedPass(Generic[Reads]):
    """One pass of new tokens through all layers.

    Attributes:
        ids: Chosen blocks of each NSA layer.
        reads: Keys read in each layer.
    """

    attend_nsa: AttendNSA[Reads]
    attend_dense: AttendDense[Reads]
    ids: list[Tensor] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)

    def run(self, model: LanguageModel, cache: DecodeCache, token_N: Tensor) -> Tensor:
        """Hidden states [N, W] after the last norm."""

        def through(index: int, block: Block, x_NW: Tensor) -> Tensor:
            layer = cache.layers[index]
            return block.add(x_NW, lambda normed_NW: self._attend(block, normed_NW, layer))

        return model.through_blocks(token_N, through)

    def _attend(self, block: Block, x_NW: Tensor, layer: LayerCache) -> Tensor:
        attention = block.attention
        if isinstance(attention, NSAAttention) and isinstance(layer, NSALayerCache):
            attended, ids, reads = self.attend_nsa(attention, x_NW, layer)
            self.ids.append(ids)
        elif isinstance(attention, DenseAttention) and isinstance(layer, DenseLayerCache):
            attended, reads = self.attend_dense(attention, x_NW, layer)
        else:
            message = f"a cache made for {type(layer).__name__} cannot serve {type(attention)}"
            raise TypeError(message)
        self.reads.append(reads)
        return attended


@dataclass(frozen=True, eq=False)
class LayerReads:
    """Keys that each new token read, int64 [B, m].

    `extend` counts the keys that its masks show; for a single token it gathers those and no others.
    A dense layer reads all of its keys as `selected`.
    """

    compressed: Tensor
    selected: Tensor
    sliding: Tensor

    @property
    def total(self) -> Tensor:
        """All branches together."""
        return self.compressed + self.selected + self.sliding


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """What one step computed.

    Attributes:
        hidden_BmW: Hidden states of the new tokens after the last norm.
        ids: Chosen blocks [B, m, G, S] of each NSA layer.
    """

    hidden_BmW: Tensor
    ids: tuple[Tensor, ...]
    reads: tuple[LayerReads, ...]


@torch.no_grad()
def extend(model: LanguageModel, cache: DecodeCache, tokens_Bm: Tensor) -> DecodeStep:
    """Add new tokens to every cached sequence and compute their hidden states.

    Raises:
        ValueError: If there are no tokens, more than a chunk, more than the cache holds, or those
            of another number of sequences.
    """
    check_tokens(tokens_Bm)
    batch, count = tokens_Bm.shape
    if batch != cache.batch:
        message = f"the cache holds {cache.batch} sequences, and there are tokens of {batch}"
        raise ValueError(message)
    first, last = cache.length, cache.length + count
    if count > cache.sizes.chunk or last > cache.sizes.capacity:
        message = (
            f"cannot add {count} tokens to {first}: the cache takes {cache.sizes.chunk} at a time "
            f"and holds {cache.sizes.capacity}"
        )
        raise ValueError(message)
    positions = Positions(first, last, batch, tokens_Bm.device)
    steps = CachedPass(
        partial(_extend_nsa, positions=positions, model=model),
        partial(_extend_dense, positions=positions, rotary=model.rotary),
    )
    hidden_NW = steps.run(model, cache, tokens_Bm.reshape(-1))
    cache.length = last
    return DecodeStep(hidden_NW.view(batch, count, -1), tuple(steps.ids), tuple(steps.reads))


def prefill(model: LanguageModel, cache: DecodeCache, tokens_BT: Tensor) -> DecodeStep:
    """Take a prompt in chunks; returns the step of the last chunk."""
    check_tokens(tokens_BT)
    first, *rest = torch.split(tokens_BT, cache.sizes.chunk, dim=1)
    step = extend(model, cache, first)
    for chunk in rest:
        step = extend(model, cache, chunk)
    return step


def logits(model: LanguageModel, step: DecodeStep) -> Tensor:
    """Logits [B, V] after the last token of a step."""
    return nn.functional.linear(step.hidden_BmW[:, -1], model.head_weight)


def _extend_nsa(
    attention: NSAAttention,
    x_NW: Tensor,
    layer: NSALayerCache,
    positions: Positions,
    model: LanguageModel,
) -> tuple[Tensor, Tensor, LayerReads]:
    rotary, geometry = model.rotary, model.geometry
    tables = rotary.tables(positions.of_all_sequences())
    projected = attention.project(x_NW)
    pairs, q_NHD = projected.pairs, rotate(projected.q_NHD, tables)
    rows_m = positions.new()
    _write(layer.selected, rows_m, rotate(pairs.k_slc, tables), pairs.v_slc)
    ring = layer.window.k.shape[1]
    _write(layer.window, rows_m % ring, rotate(pairs.k_win, tables), pairs.v_win)
    _compress_new(attention, pairs, layer, positions, rotary, geometry)
    out_cmp, ids_BmGS, reads_cmp = _attend_compressed(q_NHD, layer.compressed, positions, geometry)
    blocks = CachedBlocksPlan(ids_BmGS, positions, geometry, layer.selected.k.shape[1])
    window = _window_plan(positions, geometry.window, ring)
    out_slc, out_win = (
        gathered_attention(q_NHD, pair.k.flatten(0, 1), pair.v.flatten(0, 1), plan)[0]
        for pair, plan in ((layer.selected, blocks), (layer.window, window))
    )
    out_NW = attention.mix(attention.gate(x_NW, projected.gate_NY), (out_cmp, out_slc, out_win))
    batch = positions.batch
    return out_NW, ids_BmGS, LayerReads(reads_cmp, blocks.reads(batch), window.reads(batch))


def _extend_dense(
    attention: DenseAttention,
    x_NW: Tensor,
    layer: DenseLayerCache,
    positions: Positions,
    rotary: Rotary,
) -> tuple[Tensor, LayerReads]:
    tables = rotary.tables(positions.of_all_sequences())
    q_NHD, k_NGD, v_NGE = attention.project(x_NW)
    _write(layer.pair, positions.new(), rotate(k_NGD, tables), v_NGE)
    key_R = torch.arange(positions.last, device=x_NW.device)
    plan = CachedPlan(key_R, key_R <= positions.new()[:, None], layer.pair.k.shape[1])
    out_NHE, _ = gathered_attention(
        rotate(q_NHD, tables), layer.pair.k.flatten(0, 1), layer.pair.v.flatten(0, 1), plan
    )
    out_NW: Tensor = attention.out(out_NHE.flatten(1))
    reads_Bm = plan.reads(positions.batch)
    nothing_Bm = torch.zeros_like(reads_Bm)
    return out_NW, LayerReads(nothing_Bm, reads_Bm, nothing_Bm)


def _write(pair: PairBuffer, rows_m: Tensor, k_NGD: Tensor, v_NGE: Tensor) -> None:
    batch = pair.k.shape[0]
    pair.write(rows_m, *(x.reshape(batch, -1, *x.shape[1:]) for x in (k_NGD, v_NGE)))


def _window_plan(positions: Positions, window: int, ring: int) -> CachedPlan:
    oldest = max(0, positions.first - window + 1)
    key_R = torch.arange(oldest, positions.last, device=positions.device)
    age_mR = positions.new()[:, None] - key_R
    return CachedPlan(key_R % ring, (age_mR >= 0) & (age_mR < window), ring)


def _compress_new(
    attention: NSAAttention,
    pairs: KeysValues,
    layer: NSALayerCache,
    positions: Positions,
    rotary: Rotary,
    geometry: BlockGeometry,
) -> None:
    """Add the raw keys to the tail and compress the blocks that they complete."""
    first = geometry.num_compressed(positions.first)
    num_new = geometry.num_compressed(positions.last) - first
    ring = layer.tail.k.shape[1]
    _write(layer.tail, positions.new() % ring, pairs.k_cmp, pairs.v_cmp)
    if num_new == 0:
        return
    block_i = torch.arange(first, first + num_new, device=positions.device)
    k_new, v_new = (
        phi(_blocks(raw, block_i, geometry).to(like.dtype))
        for phi, raw, like in (
            (attention.phi_k, layer.tail.k, pairs.k_cmp),
            (attention.phi_v, layer.tail.v, pairs.v_cmp),
        )
    )
    tables = rotary.tables((block_i * geometry.compress_stride).repeat(positions.batch))
    _write(layer.compressed, block_i, rotate(k_new, tables), v_new)


def _blocks(raw_BRGD: Tensor, block_i: Tensor, geometry: BlockGeometry) -> Tensor:
    """Compression blocks of the raw tail, a ring: [B * i, l, G, D]."""
    offsets_l = torch.arange(geometry.compress_block, device=block_i.device)
    row_il = block_i[:, None] * geometry.compress_stride + offsets_l
    return raw_BRGD[:, row_il % raw_BRGD.shape[1]].flatten(0, 1)


def _attend_compressed(
    q_NHD: Tensor, pair: PairBuffer, positions: Positions, geometry: BlockGeometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of the compressed branch, the chosen blocks [B, m, G, S] and the keys read [B, m]."""
    num_groups, width_v = pair.k.shape[2], pair.v.shape[3]
    block_C = torch.arange(geometry.num_compressed(positions.last), device=positions.device)
    last_C = block_C * geometry.compress_stride + geometry.compress_block - 1
    plan = CachedPlan(block_C, last_C <= positions.new()[:, None], pair.k.shape[1])
    if plan.keys == 0:
        out_NHE = q_NHD.new_zeros(*q_NHD.shape[:2], width_v)
        shape = (positions.batch, positions.count, num_groups, 0)
        prob_BmGC = torch.zeros(shape, dtype=wide_dtype(q_NHD.dtype), device=q_NHD.device)
    else:
        k_flat, v_flat = pair.k.flatten(0, 1), pair.v.flatten(0, 1)
        out_NHE, lse_NH = gathered_attention(q_NHD, k_flat, v_flat, plan)
        prob_BmGC = _group_probabilities(q_NHD, pair.k[:, : plan.keys], lse_NH, plan)
    num_blocks = geometry.num_select_blocks(positions.last)
    score_BmGJ = select_scores(prob_BmGC, num_blocks, geometry)
    position_Bm = positions.new().expand(positions.batch, -1)
    return (
        out_NHE,
        choose_blocks(score_BmGJ, position_Bm, geometry),
        plan.reads(positions.batch),
    )


def _group_probabilities(q_NHD: Tensor, k_BCGD: Tensor, lse_NH: Tensor, plan: CachedPlan) -> Tensor:
    """Compressed probabilities summed over the heads of each group: [B, m, G, C]."""
    num_groups, wide = k_BCGD.shape[2], wide_dtype(q_NHD.dtype)
    q_BGmhD = to_tiles(q_NHD, num_groups, plan.queries).to(wide)
    lse_BGmh = to_tiles(lse_NH.unsqueeze(-1), num_groups, plan.queries).squeeze(-1)
    with torch.autocast(q_NHD.device.type, enabled=False):
        prob_BGmhC = attention_probabilities(
            q_BGmhD,
            FiniteKeys.of_keys(k_BCGD.transpose(1, 2).to(wide)),
            plan.is_visible_mR[None, None],
            lse_BGmh,
        )
    return prob_BGmhC.sum(dim=3).transpose(1, 2)
