"""Attention of query tiles to gathered keys, in memory linear in the number of tokens.

A plan says which keys a tile may read and which of them each query sees. The work is done a few
tiles at a time and done again in the backward pass, so no score outlives its chunk.
Legend: N tokens, H query heads, G groups, h = H / G, D key width, E value width, P tiles of a
chunk, Q queries of a tile, R keys of a tile, K rows of the keys.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

#: Elements of the largest temporary of one chunk. A CPU wants it in its cache; a card wants few
#: launches. Neither may reach T * T at the lengths where that would matter.
CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class TileKeys:
    """Keys of some tiles.

    Attributes:
        row_PGR: int64, position of each key in the keys flattened to [K * G, width]; always valid.
        is_visible_PGQR: bool, may have size 1 in place of G.
    """

    row_PGR: Tensor
    is_visible_PGQR: Tensor


class TilePlan(Protocol):
    """Cuts N queries into tiles of Q and names the R keys that each tile reads."""

    @property
    def queries(self) -> int:
        """Q: queries of one tile."""
        ...

    @property
    def keys(self) -> int:
        """R: keys of one tile."""
        ...

    def tile_keys(self, first: int, last: int, num_groups: int) -> TileKeys:
        """Keys of the tiles first .. last - 1."""
        ...


@dataclass(frozen=True, eq=False)
class FiniteKeys:
    """Keys and values whose numbers are all finite, and a note of which were not.

    0 * NaN is NaN: the product of a probability of 0 and a NaN would carry it to queries that do
    not see it. So products are made of finite numbers, and the note is added to the scores of the
    queries that do see the key.

    Attributes:
        k: [..., D], 0 where it was not finite.
        v: [..., E], 0 where it was not finite.
        note: [...], 0, or NaN where the key or its value was not finite.
    """

    k: Tensor
    v: Tensor
    note: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Self:
        """Part any keys and values [..., width] from what is not finite in them."""
        note = (k * 0).sum(dim=-1) + (v * 0).sum(dim=-1)
        finite_k, finite_v = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (k, v))
        return cls(finite_k, finite_v, note)

    @classmethod
    def of_keys(cls, k: Tensor) -> Self:
        """For scores alone: values of width 0."""
        return cls.of(k, k[..., :0])

    def gather(self, row_PGR: Tensor, dtype: torch.dtype) -> Self:
        """The rows [P, G, R] of keys [K, G, D] and values [K, G, E], in this dtype."""
        k, v = (_gather(x, row_PGR).to(dtype) for x in (self.k, self.v))
        return type(self)(k, v, self.note.flatten()[row_PGR].to(dtype))


def _gather(x_KGD: Tensor, row_PGR: Tensor) -> Tensor:
    flat = x_KGD.flatten(0, 1)
    return flat.index_select(0, row_PGR.flatten()).view(*row_PGR.shape, flat.shape[-1])


def attention_scores(q_PGQhD: Tensor, keys: FiniteKeys, is_visible_PGQR: Tensor) -> Tensor:
    """q.k / sqrt(D) in units of ln 2 where visible, else -inf: [P, G, Q, h, R].

    Base 2 and an added bias, because on a CPU exp2 is about 10 times as fast as exp of -inf, and
    masked_fill of all heads slower than an addition (torch 2.13, one AVX-512 core).
    """
    scaled_PGMD = q_PGQhD.flatten(2, 3) * (LOG2_E * q_PGQhD.shape[-1] ** -0.5)
    score_PGQhR = _split_rows(scaled_PGMD @ keys.k.mT, q_PGQhD)
    bias_PGQR = torch.where(is_visible_PGQR, keys.note.unsqueeze(-2), float("-inf"))
    return score_PGQhR.add_(bias_PGQR.unsqueeze(-2))


def _split_rows(x_PGMX: Tensor, like_PGQhD: Tensor) -> Tensor:
    return x_PGMX.view(*like_PGQhD.shape[:4], x_PGMX.shape[-1])


def attend_tiles(
    q_PGQhD: Tensor, keys: FiniteKeys, is_visible_PGQR: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys, then the weighted sum of their values.

    Returns:
        out_PGQhE and lse_PGQh; a query that sees nothing gets 0 and -inf.
    """
    score_PGQhR = attention_scores(q_PGQhD, keys, is_visible_PGQR)
    top_PGQh1 = score_PGQhR.amax(dim=-1, keepdim=True)
    top_PGQh1.masked_fill_(top_PGQh1 == float("-inf"), 0.0)
    weight_PGQhR = score_PGQhR.sub_(top_PGQh1).exp2_()
    total_PGQh1 = weight_PGQhR.sum(dim=-1, keepdim=True)
    out_PGQhE = _split_rows(weight_PGQhR.flatten(2, 3) @ keys.v, q_PGQhD)
    out_PGQhE /= total_PGQh1.masked_fill(total_PGQh1 == 0, 1.0)
    return out_PGQhE, (top_PGQh1 / LOG2_E + total_PGQh1.log()).squeeze(-1)


def attention_probabilities(
    q_PGQhD: Tensor, keys: FiniteKeys, is_visible_PGQR: Tensor, lse_PGQh: Tensor
) -> Tensor:
    """The softmax again, from the log-sum-exp of the forward pass: [P, G, Q, h, R]."""
    finite_PGQh = lse_PGQh.masked_fill(lse_PGQh == float("-inf"), 0.0)
    score_PGQhR = attention_scores(q_PGQhD, keys, is_visible_PGQR)
    return score_PGQhR.sub_(finite_PGQh.unsqueeze(-1) * LOG2_E).exp2_()


def to_tiles(x_NHD: Tensor, num_groups: int, queries: int) -> Tensor:
    """[N, H, D] to tiles [P, G, Q, h, D]; the last tile is filled up with zeros."""
    missing = -x_NHD.shape[0] % queries
    full_NHD = F.pad(x_NHD, (0, 0, 0, 0, 0, missing)) if missing else x_NHD
    tiles_PQGhD = full_NHD.reshape(-1, queries, num_groups, *_split_heads(x_NHD, num_groups))
    return tiles_PQGhD.transpose(1, 2)


def from_tiles(x_PGQhD: Tensor) -> Tensor:
    """Tiles [P, G, Q, h, D] back to rows [P * Q, H, D]."""
    return x_PGQhD.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _split_heads(x_NHD: Tensor, num_groups: int) -> tuple[int, int]:
    return x_NHD.shape[1] // num_groups, x_NHD.shape[2]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores and sums are kept in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(plan: TilePlan, num_queries: int, elements_per_key: int, device: str) -> Iterator[slice]:
    """Ranges of tiles whose largest temporary, R * `elements_per_key`, stays within the limit."""
    num_tiles = -(-num_queries // plan.queries)
    size = max(1, CHUNK_ELEMENTS[device] // (plan.keys * elements_per_key))
    for first in range(0, num_tiles, size):
        yield slice(first, min(first + size, num_tiles))


def _elements_per_key(q_NHD: Tensor, v_KGE: Tensor, plan: TilePlan) -> int:
    scores = q_NHD.shape[1] * plan.queries
    gathered = v_KGE.shape[1] * max(q_NHD.shape[2], v_KGE.shape[2])
    return max(scores, gathered)


def _tile_keys(
    k_KGD: Tensor, v_KGE: Tensor, plan: TilePlan, num_queries: int, dtype: torch.dtype
) -> Callable[[Tensor], FiniteKeys]:
    """What gathers the keys of a tile; rows are parted from what is not finite once at most.

    A decode step reads few of the rows that a cache holds, and touches no others.
    """
    num_read = -(-num_queries // plan.queries) * plan.keys
    if num_read < len(k_KGD):
        return lambda row_PGR: FiniteKeys.of(
            *(_gather(x, row_PGR).to(dtype) for x in (k_KGD, v_KGE))
        )
    finite = FiniteKeys.of(k_KGD, v_KGE)
    return lambda row_PGR: finite.gather(row_PGR, dtype)


class _GatheredAttention(torch.autograd.Function):
    """Forward and backward chunk by chunk; keeps q, k, v, out and lse, and no scores."""

    @staticmethod
    def forward(
        ctx: Any, q_NHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, plan: TilePlan
    ) -> tuple[Tensor, Tensor]:
        """Attend; returns out_NHE and lse_NH."""
        with torch.autocast(q_NHD.device.type, enabled=False):
            out_NHE, lse_NH = _forward(q_NHD, k_KGD, v_KGE, plan)
        ctx.plan = plan
        ctx.save_for_backward(q_NHD, k_KGD, v_KGE, out_NHE, lse_NH)
        ctx.mark_non_differentiable(lse_NH)
        return out_NHE, lse_NH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Recompute the probabilities and return the gradients of q, k and v."""
        with torch.autocast(grads[0].device.type, enabled=False):
            return (*_backward(ctx.saved_tensors, grads[0], ctx.plan), None)


def _forward(q_NHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, plan: TilePlan) -> tuple[Tensor, Tensor]:
    num_tokens, num_groups, wide = q_NHD.shape[0], k_KGD.shape[1], wide_dtype(q_NHD.dtype)
    q_PGQhD = to_tiles(q_NHD, num_groups, plan.queries)
    limit = _elements_per_key(q_NHD, v_KGE, plan)
    keys_of = _tile_keys(k_KGD, v_KGE, plan, num_tokens, wide)
    outs, lses = [], []
    for tiles in chunks(plan, num_tokens, limit, q_NHD.device.type):
        rows = plan.tile_keys(tiles.start, tiles.stop, num_groups)
        keys = keys_of(rows.row_PGR)
        out_PGQhE, lse_PGQh = attend_tiles(q_PGQhD[tiles].to(wide), keys, rows.is_visible_PGQR)
        outs.append(from_tiles(out_PGQhE).to(q_NHD.dtype))
        lses.append(from_tiles(lse_PGQh.unsqueeze(-1)).squeeze(-1))
    return torch.cat(outs)[:num_tokens], torch.cat(lses)[:num_tokens]


def _backward(
    saved: tuple[Tensor, ...], grad_NHE: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor, Tensor]:
    q_NHD, k_KGD, v_KGE, out_NHE, lse_NH = saved
    num_tokens, num_groups, wide = q_NHD.shape[0], k_KGD.shape[1], wide_dtype(q_NHD.dtype)
    q_PGQhD, grad_PGQhE = (to_tiles(x, num_groups, plan.queries) for x in (q_NHD, grad_NHE))
    lse_PGQh = to_tiles(lse_NH.unsqueeze(-1), num_groups, plan.queries).squeeze(-1)
    delta_NH = (grad_NHE.to(wide) * out_NHE.to(wide)).sum(dim=-1, keepdim=True)
    delta_PGQh1 = to_tiles(delta_NH, num_groups, plan.queries)
    grad_k = torch.zeros(k_KGD.shape, dtype=wide, device=k_KGD.device)
    grad_v = torch.zeros(v_KGE.shape, dtype=wide, device=v_KGE.device)
    keys_of, grads_q = _tile_keys(k_KGD, v_KGE, plan, num_tokens, wide), []
    for tiles in chunks(plan, num_tokens, _elements_per_key(q_NHD, v_KGE, plan), q_NHD.device.type):
        rows = plan.tile_keys(tiles.start, tiles.stop, num_groups)
        keys = keys_of(rows.row_PGR)
        q_tile, grad_tile = q_PGQhD[tiles].to(wide), grad_PGQhE[tiles].to(wide)
        prob = attention_probabilities(q_tile, keys, rows.is_visible_PGQR, lse_PGQh[tiles])
        grad_PGME = grad_tile.flatten(2, 3)
        _add_rows(grad_v, rows.row_PGR, prob.flatten(2, 3).mT @ grad_PGME)
        grad_prob = _split_rows(grad_PGME @ keys.v.mT, q_tile)
        grad_score = prob.mul_(grad_prob.sub_(delta_PGQh1[tiles])).flatten(2, 3)
        grad_score *= q_NHD.shape[-1] ** -0.5
        _add_rows(grad_k, rows.row_PGR, grad_score.mT @ q_tile.flatten(2, 3))
        grads_q.append(from_tiles(_split_rows(grad_score @ keys.k, q_tile)))
    grad_q = torch.cat(grads_q)[:num_tokens]
    return grad_q.to(q_NHD.dtype), grad_k.to(k_KGD.dtype), grad_v.to(v_KGE.dtype)


def _add_rows(total_KGD: Tensor, row_PGR: Tensor, part_PGRD: Tensor) -> None:
    total_KGD.view(-1, total_KGD.shape[-1]).index_add_(
        0, row_PGR.flatten(), part_PGRD.flatten(0, 2)
    )


def gathered_attention(
    q_NHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that the plan makes visible; differentiable in q, k and v.

    Returns:
        out_NHE in the dtype of q, and lse_NH in `wide_dtype`, without gradient.
    """
    out_NHE, lse_NH = _GatheredAttention.apply(  # type: ignore[no-untyped-call]  # torch's own
        q_NHD, k_KGD, v_KGE, plan
    )
    return out_NHE, lse_NH
