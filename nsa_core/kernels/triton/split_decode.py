"""Decode: one query per sequence, its keys split over programs, in four launches.

1. `partial_cached_kernel`: slices of the compressed keys and of the window, with their own softmax;
   the compressed scores are kept. 2. `rank_blocks_kernel`: normalisers, block scores (Eq. 8-10) and
   the best blocks of each tile of blocks. 3. `partial_chosen_kernel`: the best of those, and slices
   of their keys. 4. `merge_kernel`: all slices of a head, gated and summed.

Every slice is written at every step (`decode_slices.py`), so nothing of an earlier step is ever
read. Slices are cut on the device from each sequence's own position; the grids follow from the
buffers, so a CUDA graph holds for every position.

With OVERLAPPED a launch begins while the one before it still runs (programmatic dependent launch,
sm_90), and `gdc_wait` stands before the first read of what that one wrote. Every program waits, so
the end of a launch is the end of all before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa_core.kernels.triton.decode_slices import (
    block_key,
    cached_slice,
    chosen_step,
    empty_slice,
    keep_slice,
    load_query,
    num_better,
)
from nsa_core.kernels.triton.rows import COMPRESSED, INFINITY, LOWEST, is_free, num_visible
from nsa_core.kernels.triton.topk import NONE, given_blocks


@triton.jit(do_not_specialize=["rows", "window_rows", "num_slots", "span_slots", "window_slots"])
def partial_cached_kernel(
    Q, K, V, K_WINDOW, V_WINDOW, POSITION, SCORE, PEAK, TOTAL, OUT, COUNT,
    rows, window_rows, num_slots, span_slots, window_slots, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One slice of the compressed keys (slots 0 .. span_slots - 1) or of the window (the next)."""
    if OVERLAPPED:
        gdc_launch_dependents()
    slot = tl.program_id(0)
    pair = tl.program_id(1)
    position = tl.load(POSITION + pair // G).to(tl.int32)
    q = load_query(Q, pair, HG, D, ROWS)
    peak, total, out, count = cached_slice(
        q, K, V, K_WINDOW, V_WINDOW, SCORE, pair, slot, span_slots, window_slots, position, rows,
        window_rows, qk_scale, SPAN, STRIDE, WINDOW, G, HG, D, E, ROWS, KEYS, STAGES,
    )  # fmt: skip
    keep_slice(
        PEAK, TOTAL, OUT, COUNT, pair * num_slots + slot, peak, total, out, count, HG, E, ROWS
    )


@triton.jit
def _log_normaliser(PEAK, TOTAL, first_slot, num_slots, HG: tl.constexpr, HEADS: tl.constexpr,
                    SLOTS: tl.constexpr):  # fmt: skip
    """Log2 of each head's normaliser over a range of slices: [HEADS], 0 for heads beyond HG."""
    head = tl.arange(0, HEADS)
    slot = tl.arange(0, SLOTS)
    held = (head < HG)[:, None] & (slot < num_slots)[None, :]
    row = (first_slot.to(tl.int64) + slot)[None, :] * HG + head[:, None]
    peak = tl.load(PEAK + row, mask=held, other=LOWEST)
    total = tl.load(TOTAL + row, mask=held, other=0.0)
    top = tl.max(peak, 1)
    weight = tl.sum(total * tl.exp2(peak - top[:, None]), 1)
    return tl.where(weight > 0, top + tl.log2(tl.where(weight > 0, weight, 1.0)), 0.0)


@triton.jit
def _scores_at(first, row, visible, held):
    """Scores [HEADS, blocks] of one compressed key for each block, -inf of one not to be seen."""
    seen = held & ((row >= 0) & (row < visible))[None, :]
    return tl.load(first + row[None, :], mask=seen, other=-INFINITY)


@triton.jit
def _block_scores(
    SCORE, PEAK, TOTAL, pair, block, position, rows, num_slots, span_slots,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, HG: tl.constexpr,
    HEADS: tl.constexpr, SPAN_SLOTS: tl.constexpr,
):  # fmt: skip
    """Importance of these selection blocks; equal blocks add equal terms in one order."""
    REACH: tl.constexpr = SPAN // STRIDE
    STEP: tl.constexpr = BLOCK // STRIDE
    visible = num_visible(position, COMPRESSED, SPAN, STRIDE)
    head = tl.arange(0, HEADS)
    first = SCORE + (pair.to(tl.int64) * HG + head)[:, None] * rows
    held = (head < HG)[:, None]
    # One load goes ahead of the normalisers' sums; the others find their lines where it left them.
    score = _scores_at(first, block * STEP + 1 - REACH, visible, held)
    offset_h = _log_normaliser(PEAK, TOTAL, pair * num_slots, span_slots, HG, HEADS, SPAN_SLOTS)
    by_head = tl.exp2(score - offset_h[:, None])  # the first key reaches one stride into the block
    for offset in tl.static_range(2 - REACH, STEP):
        score = _scores_at(first, block * STEP + offset, visible, held)
        strides = min(offset + REACH, STEP) - max(offset, 0)
        by_head += strides * tl.exp2(score - offset_h[:, None])
    return tl.sum(by_head, 0)


@triton.jit(do_not_specialize=["rows", "num_slots", "span_slots"])
def rank_blocks_kernel(
    SCORE, PEAK, TOTAL, POSITION, BEST, rows, num_slots, span_slots,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, HEADS: tl.constexpr, SPAN_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr, KEEP: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """The best KEEP of BLOCKS selection blocks, in order: BEST [B, G, tiles, KEEP], -1 at the end.

    HEADS and SPAN_SLOTS are the powers of two that hold the heads and the slices. Forced blocks
    are left out; where every block that has started is taken, nothing is ranked.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    position = tl.load(POSITION + pair // G).to(tl.int32)
    if OVERLAPPED:
        gdc_wait()
    current = position // BLOCK
    if current >= CHOSEN:
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        is_open = is_free(block, current)
        score = _block_scores(
            SCORE, PEAK, TOTAL, pair, block, position, rows, num_slots, span_slots,
            SPAN, STRIDE, BLOCK, HG, HEADS, SPAN_SLOTS,
        )  # fmt: skip
        key = block_key(score, block, is_open)
        rank = num_better(key)
        target = BEST + (pair.to(tl.int64) * tl.num_programs(0) + tile) * KEEP
        tl.store(target + rank, key, mask=is_open & (rank < KEEP))
        column = tl.arange(0, KEEP)
        none = tl.full([KEEP], -1, tl.int64)
        tl.store(target + column, none, mask=column >= tl.sum(is_open.to(tl.int32), 0))


@triton.jit
def _choose(
    BEST, pair, current, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, RANKED: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Ids [COLUMNS] of one sequence and group in any order; NONE and above are padding.

    RANKED candidates are left by all tiles. The best one is taken until there are enough, or
    (COUNTED) each is put where the number of better ones says, RANKED comparisons for each.
    """
    column = tl.arange(0, COLUMNS)
    ids = given_blocks(column, current, CHOSEN)
    if current >= CHOSEN:
        key = tl.load(BEST + pair.to(tl.int64) * RANKED + tl.arange(0, RANKED))
        score = (key >> 32).to(tl.int32)  # -1 where there is none
        block = NONE - (key & 0xFFFFFFFF).to(tl.int32)
        if COUNTED:
            is_here = num_better(key)[None, :] == column[:, None]
            taken = tl.sum(tl.where(is_here, block[None, :], 0), 1)
            ids = tl.where(column < CHOSEN - 3, taken, ids)
        else:
            for n in range(CHOSEN - 3):
                best = score == tl.max(score, 0)
                first = tl.min(tl.where(best, block, NONE), 0)
                ids = tl.where(column == n, first, ids)
                score = tl.where(best & (block == first), -1, score)
    return ids


@triton.jit(do_not_specialize=["rows", "num_slots", "first_slot"])
def partial_chosen_kernel(
    Q, K, V, POSITION, BEST, IDS, PEAK, TOTAL, OUT, COUNT, rows, num_slots, first_slot, qk_scale,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, RANKED: tl.constexpr,
    SHARE: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, COUNTED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """SHARE keys of the chosen blocks laid end to end; padding and future keys are not read.

    Every program finds the choice by itself, which is cheaper than a launch; the first one of a
    sequence and group leaves it in IDS, ascending, -1 at the end.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    slot = tl.program_id(0)
    pair = tl.program_id(1)
    position = tl.load(POSITION + pair // G).to(tl.int32)
    q = load_query(Q, pair, HG, D, ROWS)
    if OVERLAPPED:
        gdc_wait()
    ids = _choose(BEST, pair, position // BLOCK, CHOSEN, COLUMNS, RANKED, COUNTED)
    if slot == 0:
        place = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), 1)
        target = IDS + pair.to(tl.int64) * CHOSEN + place
        tl.store(target, tl.where(ids >= NONE, -1, ids), mask=place < CHOSEN)
    peak, total, out = empty_slice(ROWS, E)
    count = tl.zeros([KEYS], tl.int32)
    for start in tl.range(slot * SHARE, slot * SHARE + SHARE, KEYS, num_stages=STAGES):
        index = start + tl.arange(0, KEYS)
        nth = index // BLOCK
        is_nth = nth[None, :] == tl.arange(0, COLUMNS)[:, None]
        block = tl.sum(tl.where(is_nth, ids[:, None], 0), 0)
        is_chosen = (nth < CHOSEN) & (block < NONE)
        peak, total, out, read = chosen_step(
            q, K, V, pair, block, index % BLOCK, is_chosen, position, rows, qk_scale,
            peak, total, out, BLOCK, G, D, E,
        )  # fmt: skip
        count += read
    keep_slice(
        PEAK, TOTAL, OUT, COUNT, pair * num_slots + first_slot + slot, peak, total, out,
        tl.sum(count, 0), HG, E, ROWS,
    )  # fmt: skip


@triton.jit
def _branch_share(peak, total, inside):
    """What a slice's output counts for in that of its branch: [SLOTS], 0 outside of the branch."""
    top = tl.max(tl.where(inside, peak, LOWEST), 0)
    weight = tl.exp2(tl.where(inside, peak - top, -INFINITY))
    divisor = tl.sum(weight * total, 0)
    return weight / tl.where(divisor > 0, divisor, 1.0)


@triton.jit(do_not_specialize=["num_slots", "span_slots", "window_slots"])
def merge_kernel(
    PEAK, TOTAL, PART, GATE, OUT, num_slots, span_slots, window_slots,
    HG: tl.constexpr, E: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Gated sum of COLUMNS of one head; GATE [B, H, 3] is (compressed, selected, window).

    SLOTS is the power of two that holds the slices of all branches: all are read at once.
    """
    row = tl.program_id(0)
    gate_at = GATE + row.to(tl.int64) * 3
    compressed = tl.load(gate_at).to(tl.float32)
    chosen = tl.load(gate_at + 1).to(tl.float32)
    window = tl.load(gate_at + 2).to(tl.float32)
    if OVERLAPPED:
        gdc_wait()
    slot = tl.arange(0, SLOTS)
    held = slot < num_slots
    at = (row // HG * num_slots + slot).to(tl.int64) * HG + row % HG
    peak = tl.load(PEAK + at, mask=held, other=LOWEST)
    total = tl.load(TOTAL + at, mask=held, other=0.0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.load(PART + at[:, None] * E + column[None, :], mask=held[:, None], other=0.0)
    end = span_slots + window_slots
    share = compressed * _branch_share(peak, total, slot < span_slots)
    share += window * _branch_share(peak, total, (slot >= span_slots) & (slot < end))
    share += chosen * _branch_share(peak, total, held & (slot >= end))
    out = tl.sum(part * share[:, None], 0)
    tl.store(OUT + row.to(tl.int64) * E + column, out.to(OUT.dtype.element_ty))
