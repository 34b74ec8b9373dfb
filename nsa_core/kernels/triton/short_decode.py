"""Decode of a short cache: slices of all three branches in one launch, then the merge.

Whoever reads a block that is chosen freely ranks all blocks by itself, from the compressed keys:
where these are few, reading them again costs less than a launch. No score leaves a program.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa_core.kernels.triton.decode_slices import (
    block_key,
    cached_slice,
    chosen_step,
    empty_slice,
    keep_slice,
    load_query,
    num_better,
)
from nsa_core.kernels.triton.rows import (
    COMPRESSED,
    INFINITY,
    LOWEST,
    is_free,
    matmul,
    num_visible,
)
from nsa_core.kernels.triton.topk import NONE, given_blocks


@triton.jit
def _block_scores(
    q, k, row, visible, qk_scale,
    BLOCKS: tl.constexpr, REACH: tl.constexpr, STEP: tl.constexpr, HG: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Importance of all selection blocks (Eq. 8-10); equal blocks add equal terms in one order.

    A compressed key covers REACH strides, from the first of its own on, and no more than the next
    selection block of STEP strides.
    """
    seen = (row < visible)[:, None] & (tl.arange(0, ROWS) < HG)[None, :]
    score = tl.where(seen, matmul(k, tl.trans(q)) * qk_scale, -INFINITY)
    top = tl.maximum(tl.max(score, 0), LOWEST)
    weight = tl.exp2(score - top[None, :])
    total = tl.sum(weight, 0)
    share = tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)
    prob = tl.sum(weight * share[None, :], 1)
    strides = tl.minimum(STEP - tl.arange(0, STEP), REACH)
    score = tl.sum(tl.reshape(prob, [BLOCKS, STEP]) * strides[None, :], 1)
    first = tl.arange(0, BLOCKS) * STEP + (BLOCKS * STEP)
    for reached in tl.static_range(1, REACH):  # strides, by the key so many before the block
        score += reached * tl.gather(prob, (first + reached - REACH) % (BLOCKS * STEP), 0)
    return score


@triton.jit
def _keep_ids(IDS, pair, rank, current, CHOSEN: tl.constexpr, BLOCKS: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    """Leave the chosen blocks in IDS [B, G, CHOSEN], ascending, -1 at the end."""
    block = tl.arange(0, BLOCKS)
    is_given = ~is_free(block, current) | (current < CHOSEN)
    is_taken = (block <= current) & (is_given | (rank < CHOSEN - 3))
    target = IDS + pair.to(tl.int64) * CHOSEN
    taken = is_taken.to(tl.int32)
    tl.store(target + tl.cumsum(taken, 0) - 1, block, mask=is_taken)
    column = tl.arange(0, COLUMNS)
    is_empty = (column >= tl.sum(taken, 0)) & (column < CHOSEN)
    tl.store(target + column, tl.full([COLUMNS], -1, tl.int32), mask=is_empty)


@triton.jit
def _all_keys(
    K, pair, rows, G: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, IS_FULL: tl.constexpr
):
    """Compressed keys [KEYS, D] of the whole buffer, seen or not: they wait for no position.

    IS_FULL: the buffer has KEYS rows, so none is masked, and the loads begin sooner.
    """
    row = tl.arange(0, KEYS)  # so few that their offsets need no 64 bits
    first = K + ((pair // G).to(tl.int64) * rows * G + pair % G) * D
    at = first + row[:, None] * (G * D) + tl.arange(0, D)[None, :]
    if IS_FULL:
        return tl.load(at)
    return tl.load(at, mask=(row < rows)[:, None], other=0.0)


@triton.jit
def _rank_blocks(
    q, k, position, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCKS: tl.constexpr, HG: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Place of each block among those that are chosen freely; BLOCKS of all others.

    Where every block that has started is taken, nothing is ranked.
    """
    STEP: tl.constexpr = BLOCK // STRIDE
    rank = tl.full([BLOCKS], BLOCKS, tl.int32)
    current = position // BLOCK
    if current >= CHOSEN:
        row = tl.arange(0, BLOCKS * STEP)
        visible = num_visible(position, COMPRESSED, SPAN, STRIDE)
        score = _block_scores(q, k, row, visible, qk_scale, BLOCKS, SPAN // STRIDE, STEP, HG, HEADS)
        block = tl.arange(0, BLOCKS)
        is_open = is_free(block, current)
        # The product keeps a score on four threads, which would all compare it: a gather moves it.
        key = tl.gather(block_key(score, block, is_open), block, 0)
        rank = tl.where(is_open, num_better(key), BLOCKS)
    return rank


@triton.jit(do_not_specialize=[
    "rows", "token_rows", "window_rows", "num_slots", "span_slots", "window_slots",
])  # fmt: skip
def partial_short_kernel(
    Q, K, V, K_TOKEN, V_TOKEN, K_WINDOW, V_WINDOW, POSITION, IDS, PEAK, TOTAL, OUT, COUNT,
    rows, token_rows, window_rows, num_slots, span_slots, window_slots, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    WINDOW: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, IS_FULL: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One slice: KEYS of the nth chosen block, or compressed keys, or some of the window.

    Those of chosen blocks take longest and come first, and behind them one program of each sequence
    and group that leaves the ids. BLOCKS and COLUMNS are the powers of two that hold the selection
    blocks of the buffer and the chosen ones. IS_FULL: the buffer has the compressed keys of BLOCKS.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    PARTS: tl.constexpr = BLOCK // KEYS
    HEADS: tl.constexpr = 8 if HG <= 8 else ROWS
    slot = tl.program_id(0)
    pair = tl.program_id(1)
    position = tl.load(POSITION + pair // G).to(tl.int32)
    # Every branch reads the queries by itself: up here, their copy into shared memory would wait
    # for them, and the keys behind it.
    if slot <= CHOSEN * PARTS:
        nth = slot // PARTS  # the last three are forced
        current = position // BLOCK
        chosen = given_blocks(nth, current, CHOSEN)
        rank = tl.full([BLOCKS], BLOCKS, tl.int32)
        if (nth < CHOSEN - 3) | (nth == CHOSEN):
            k = _all_keys(K, pair, rows, G, D, BLOCKS * (BLOCK // STRIDE), IS_FULL)
            q = load_query(Q, pair, HG, D, ROWS)
            rank = _rank_blocks(
                load_query(Q, pair, HG, D, HEADS), k, position, qk_scale,
                SPAN, STRIDE, BLOCK, CHOSEN, BLOCKS, HG, HEADS,
            )  # fmt: skip
            is_nth = rank == nth
            if (current >= CHOSEN) & (nth < CHOSEN):
                chosen = tl.sum(tl.where(is_nth, tl.arange(0, BLOCKS), 0), 0)
        else:
            q = load_query(Q, pair, HG, D, ROWS)
        if nth == CHOSEN:
            _keep_ids(IDS, pair, rank, current, CHOSEN, BLOCKS, COLUMNS)
        else:
            peak, total, out = empty_slice(ROWS, E)
            count = tl.zeros([KEYS], tl.int32)
            first = slot % PARTS * KEYS
            for start in tl.range(first, first + KEYS, KEYS, num_stages=STAGES):
                peak, total, out, read = chosen_step(
                    q, K_TOKEN, V_TOKEN, pair, chosen, start + tl.arange(0, KEYS), chosen < NONE,
                    position, token_rows, qk_scale, peak, total, out, BLOCK, G, D, E,
                )  # fmt: skip
                count += read
            place = pair * num_slots + span_slots + window_slots + slot
            keep_slice(
                PEAK, TOTAL, OUT, COUNT, place, peak, total, out, tl.sum(count, 0), HG, E, ROWS
            )
    else:
        cached = slot - CHOSEN * PARTS - 1
        q = load_query(Q, pair, HG, D, ROWS)
        peak, total, out, count = cached_slice(
            q, K, V, K_WINDOW, V_WINDOW, None, pair, cached, span_slots, window_slots, position,
            rows, window_rows, qk_scale, SPAN, STRIDE, WINDOW, G, HG, D, E, ROWS, KEYS, STAGES,
        )  # fmt: skip
        place = pair * num_slots + cached
        keep_slice(PEAK, TOTAL, OUT, COUNT, place, peak, total, out, count, HG, E, ROWS)
