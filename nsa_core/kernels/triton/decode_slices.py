"""What the launches of decode share: queries, rows, slices of keys and the order of blocks.

The h heads of a group are the rows of one tile of ROWS >= 16. A slice leaves its running maximum
(base 2), its sum and its unnormalised output; one that saw nothing leaves LOWEST, 0 and 0.
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.rows import (
    COMPRESSED,
    INFINITY,
    LOWEST,
    matmul,
    num_visible,
    softmax_step,
)
from nsa_core.kernels.triton.topk import NONE


@triton.jit
def load_query(Q, pair, HG: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Queries [ROWS, D] of one sequence and group."""
    head = tl.arange(0, ROWS)
    at = (pair.to(tl.int64) * HG + head)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(Q + at, mask=(head < HG)[:, None], other=0.0)


@triton.jit
def load_rows(X, row, seen, first_row, g, G: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [keys, WIDTH] of a buffer [B * R, G, WIDTH]."""
    at = ((first_row + row) * G + g)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(X + at, mask=seen[:, None], other=0.0)


@triton.jit
def keep_slice(
    PEAK, TOTAL, OUT, COUNT, slot, peak, total, out, count,
    HG: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Leave one slice's softmax: PEAK, TOTAL [slots, HG], OUT [slots, HG, E], COUNT [slots]."""
    head = tl.arange(0, ROWS)
    row = slot.to(tl.int64) * HG + head
    held = head < HG
    tl.store(PEAK + row, peak, mask=held)
    tl.store(TOTAL + row, total, mask=held)
    tl.store(OUT + row[:, None] * E + tl.arange(0, E)[None, :], out, mask=held[:, None])
    tl.store(COUNT + slot, count)


@triton.jit
def empty_slice(ROWS: tl.constexpr, E: tl.constexpr):
    """Maximum, sum and output of a slice that has seen nothing."""
    peak = tl.full([ROWS], LOWEST, tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, E], tl.float32)


@triton.jit
def _slice_of(visible, slot, slots, KEYS: tl.constexpr):
    """First key of a slice and the one behind its last, in whole tiles of KEYS."""
    share = tl.cdiv(tl.cdiv(visible, KEYS), slots) * KEYS
    first = tl.minimum(slot * share, visible)
    return first, tl.minimum(first + share, visible)


@triton.jit
def _compressed_slice(
    q, K, V, SCORE, pair, slot, slots, position, rows, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, HG: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One of `slots` slices of the compressed keys; leaves their scores in SCORE, unless None."""
    g = pair % G
    sequence = (pair // G).to(tl.int64)
    head = tl.arange(0, ROWS)
    peak, total, out = empty_slice(ROWS, E)
    visible = num_visible(position, COMPRESSED, SPAN, STRIDE)
    first, last = _slice_of(visible, slot, slots, KEYS)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        row = start + tl.arange(0, KEYS)
        seen = row < last
        k = load_rows(K, row, seen, sequence * rows, g, G, D)
        v = load_rows(V, row, seen, sequence * rows, g, G, E)
        scores = matmul(q, tl.trans(k))
        if SCORE is not None:
            score_at = (pair.to(tl.int64) * HG + head)[:, None] * rows
            held = (head < HG)[:, None] & seen[None, :]
            tl.store(SCORE + score_at + row[None, :], scores * qk_scale, mask=held)
        scores = tl.where(seen[None, :], scores, -INFINITY)
        peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, seen, False)
    return peak, total, out, last - first


@triton.jit
def _window_slice(
    q, K, V, pair, slot, slots, position, rows, qk_scale,
    WINDOW: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One of `slots` slices of the window, whose tokens lie in a ring of `rows`."""
    g = pair % G
    sequence = (pair // G).to(tl.int64)
    peak, total, out = empty_slice(ROWS, E)
    oldest = tl.maximum(position - WINDOW + 1, 0)
    visible = position + 1 - oldest
    first, last = _slice_of(visible, slot, slots, KEYS)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        index = start + tl.arange(0, KEYS)
        seen = index < last
        row = (oldest + index) % rows
        k = load_rows(K, row, seen, sequence * rows, g, G, D)
        v = load_rows(V, row, seen, sequence * rows, g, G, E)
        scores = tl.where(seen[None, :], matmul(q, tl.trans(k)), -INFINITY)
        peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, seen, False)
    return peak, total, out, last - first


@triton.jit
def cached_slice(
    q, K, V, K_WINDOW, V_WINDOW, SCORE, pair, slot, span_slots, window_slots, position, rows,
    window_rows, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr,
    HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A slice of the compressed keys (slots 0 .. span_slots - 1) or of the window (the next)."""
    if slot < span_slots:
        peak, total, out, count = _compressed_slice(
            q, K, V, SCORE, pair, slot, span_slots, position, rows, qk_scale,
            SPAN, STRIDE, G, HG, D, E, ROWS, KEYS, STAGES,
        )  # fmt: skip
    else:
        peak, total, out, count = _window_slice(
            q, K_WINDOW, V_WINDOW, pair, slot - span_slots, window_slots, position, window_rows,
            qk_scale, WINDOW, G, D, E, ROWS, KEYS, STAGES,
        )  # fmt: skip
    return peak, total, out, count


@triton.jit
def chosen_step(
    q, K, V, pair, block, offset, is_chosen, position, rows, qk_scale, peak, total, out,
    BLOCK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Fold tokens at these offsets of their blocks in; also which of them were read."""
    g = pair % G
    first_row = (pair // G).to(tl.int64) * rows
    row = tl.where(is_chosen, block, 0) * BLOCK + offset
    seen = is_chosen & (row <= position)
    # Values first: once keys have come, they wait for a barrier, and a load behind that for them.
    v = load_rows(V, row, seen, first_row, g, G, E)
    k = load_rows(K, row, seen, first_row, g, G, D)
    scores = tl.where(seen[None, :], matmul(q, tl.trans(k)), -INFINITY)
    peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, seen, False)
    return peak, total, out, seen.to(tl.int32)


@triton.jit
def block_key(score, block, is_open):
    """Integers that order blocks: the higher score, then the lower index; -1 if not open."""
    # No score is negative, so its bits order like an integer; below them, the lower index.
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(is_open, (bits << 32) | (NONE - block.to(tl.int64)), -1)


@triton.jit
def num_better(key):
    """How many keys are above each; a thread adds up those of its own, without the others."""
    return tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
