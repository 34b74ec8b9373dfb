"""One new token for every cached sequence, computed from tensors alone.

The host decides nothing here: no value is read back, no shape depends on a position, no buffer is
made anew. So one CUDA graph of `decode_step` serves every position, and sequences may stand at
different positions. `decode.extend` does the same for many tokens at once.
Legend: B sequences, W model width, H heads, G groups, D key width, E value width, l tokens of a
compressed block.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nsa_core.kernels.cuda_graph import capture
from nsa_core.kernels.decode_attention import (
    CachedPairs,
    CountedReads,
    DecodeAttention,
    attend_one,
    by_group,
)
from nsa_core.kernels.dispatch import choose_decode_attention
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.attention import DenseAttention, KeysValues, NSAAttention
from nsa_core.model.cache import DecodeCache, DenseLayerCache, NSALayerCache, PairBuffer
from nsa_core.model.decode import CachedPass, LayerReads
from nsa_core.model.rotary import Rotary, rotate
from nsa_core.model.transformer import TOKEN_DTYPES, LanguageModel


@dataclass(frozen=True, eq=False)
class TokenStep:
    """What one step computed; a replay of its graph computes it anew in the same memory.

    Attributes:
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
    The int64 `position_B` may differ between sequences; `attend` serves the NSA layers.
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


def describe_decode(model: LanguageModel) -> str:
    """How a model decodes where it is: one line for people."""
    attention = choose_decode_attention(model.backends).name
    kind = "dense" if model.config.attention == "dense" else f"{attention} attention"
    is_cuda = model.embedding.weight.is_cuda
    return f"{kind}, one CUDA graph for all positions" if is_cuda else f"{kind}, no CUDA graph"


class DecodeLoop:
    """Adds one token to every sequence of a cache at a time.

    What `step` returns on a card lies in the graph's memory: the next step overwrites it.
    """

    def __init__(
        self, model: LanguageModel, cache: DecodeCache, *, use_graph: bool | None = None
    ) -> None:
        """Make the loop for a cache that holds the prompt; the first step captures the graph.

        The weights are at their final addresses. `use_graph` None means a graph on CUDA.
        """
        device = model.embedding.weight.device
        is_cuda = device.type == "cuda"
        if use_graph and not is_cuda:
            message = f"a CUDA graph needs a CUDA device, and the model is on {device}"
            raise ValueError(message)
        self.model, self.cache = model, cache
        self.attend = choose_decode_attention(model.backends)
        self.uses_graph = is_cuda if use_graph is None else use_graph
        self._token_B = torch.zeros(cache.batch, dtype=torch.int64, device=device)
        self._position_B = torch.zeros_like(self._token_B)
        self._captured: tuple[torch.cuda.CUDAGraph, TokenStep] | None = None

    def step(self, token_B: Tensor) -> TokenStep:
        """Add these ids, on the device, and compute the logits after them; the host does not wait.

        Raises:
            ValueError: If the cache is full, or there is not one id of each sequence.
        """
        if token_B.shape != self._token_B.shape or token_B.dtype not in TOKEN_DTYPES:
            message = (
                f"a step takes {len(self._token_B)} ids as int64 or int32, got "
                f"{list(token_B.shape)} of {token_B.dtype}"
            )
            raise ValueError(message)
        if self.cache.length >= self.cache.sizes.capacity:
            message = f"the cache is full: it holds {self.cache.sizes.capacity} tokens"
            raise ValueError(message)
        self._token_B.copy_(token_B)
        self._position_B.fill_(self.cache.length)
        step = self._replay() if self.uses_graph else self._compute()
        self.cache.length += 1
        return step

    def _compute(self) -> TokenStep:
        return decode_step(self.model, self.cache, self._token_B, self._position_B, self.attend)

    def _replay(self) -> TokenStep:
        """What the warm-up writes to the caches, the first replay writes again."""
        if self._captured is None:
            self._captured = capture(self._compute, self._token_B.device)
        graph, step = self._captured
        graph.replay()
        return step
