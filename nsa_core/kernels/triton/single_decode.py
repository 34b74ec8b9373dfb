"""Decode in one launch: the four steps of `split_decode.py` as work items of programs that stay.

A program takes its items of every step, the first step first, and waits for those of other programs
through counters in memory. An item waits only for items of earlier steps of its own sequence and
group, and all programs are on the card at the same time (a cooperative launch), so the wait ends.
The last item of a sequence and group sets its counters back to 0 for the next launch. Without the
waits, a step a launch, the same code runs under the interpreter.
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.split_decode import (
    cached_slice,
    chosen_slice,
    load_gates,
    load_position,
    load_query,
    merge_columns,
    rank_tile,
)

ALL_STEPS = tl.constexpr(0)
COUNTERS = tl.constexpr(4)  # of a sequence and group: one for each step
PITCH = tl.constexpr(32)  # between counters, in int32: each has a cache line of its own
MAX_POLLS = tl.constexpr(1 << 24)  # several seconds; a step takes microseconds


@triton.jit
def _counter(COUNTER, pair, STEP: tl.constexpr):
    return COUNTER + (pair * COUNTERS + STEP - 1) * PITCH


@triton.jit
def _report(counter):
    """One item more is done; whoever sees that sees what this program wrote."""
    tl.debug_barrier()  # the writes of all threads come before the one thread's release
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _read_acquired(counter):
    """Value of a counter; reads after it see what was written before the counter was raised."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _await(counter, wanted):
    """Wait until so many items are reported; after MAX_POLLS the launch ends with an error."""
    seen = _read_acquired(counter)
    polls = 0
    while seen < wanted:
        seen = _read_acquired(counter)
        polls += 1
        if polls > MAX_POLLS:
            tl.inline_asm_elementwise(
                "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
    tl.debug_barrier()


@triton.jit
def _leave(COUNTER, pair, num_items):
    """Report an item of the last step; whoever is the last to do so sets all counters back.

    An item that has come here waits for nothing more, and neither do those of earlier steps.
    """
    before = tl.atomic_add(_counter(COUNTER, pair, COUNTERS), 1, sem="acq_rel", scope="gpu")
    if before == num_items - 1:
        step = tl.arange(0, COUNTERS)
        zeros = tl.zeros([COUNTERS], tl.int32)
        tl.store(COUNTER + (pair * COUNTERS + step) * PITCH, zeros)


@triton.jit(
    do_not_specialize=[
        "num_pairs", "rows", "window_rows", "chosen_rows",
        "span_slots", "window_slots", "chosen_slots", "tiles",
    ]
)  # fmt: skip
def single_decode_kernel(
    Q, K, V, K_WINDOW, V_WINDOW, K_CHOSEN, V_CHOSEN, POSITION, GATE,
    SCORE, PEAK, TOTAL, PART, COUNT, BEST, IDS, OUT, COUNTER,
    num_pairs, rows, window_rows, chosen_rows, span_slots, window_slots, chosen_slots, tiles,
    qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    HEADS: tl.constexpr, SPAN_SLOTS: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr,
    RANKED: tl.constexpr, SHARE: tl.constexpr, COUNTED: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All steps with waits between them (STEP is ALL_STEPS), or step 1, 2, 3 or 4 alone."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cached_slots = span_slots + window_slots
    num_slots = cached_slots + chosen_slots
    if STEP == ALL_STEPS or STEP == 1:
        item = program
        while item < num_pairs * cached_slots:
            pair = item // cached_slots
            cached_slice(
                Q, K, V, K_WINDOW, V_WINDOW, POSITION, SCORE, PEAK, TOTAL, PART, COUNT,
                item % cached_slots, pair, rows, window_rows, num_slots, span_slots, window_slots,
                qk_scale, SPAN, STRIDE, WINDOW, G, HG, D, E, ROWS, KEYS, STAGES,
            )  # fmt: skip
            if STEP == ALL_STEPS:
                _report(_counter(COUNTER, pair, 1))
            item += programs
    if STEP == ALL_STEPS or STEP == 2:
        item = program
        while item < num_pairs * tiles:
            pair = item // tiles
            position = load_position(POSITION, pair, G)
            if STEP == ALL_STEPS:
                _await(_counter(COUNTER, pair, 1), cached_slots)
            rank_tile(
                SCORE, PEAK, TOTAL, BEST, item % tiles, tiles, pair, position,
                rows, num_slots, span_slots,
                SPAN, STRIDE, BLOCK, CHOSEN, HG, HEADS, SPAN_SLOTS, BLOCKS, KEEP, True,
            )  # fmt: skip
            if STEP == ALL_STEPS:
                _report(_counter(COUNTER, pair, 2))
            item += programs
    if STEP == ALL_STEPS or STEP == 3:
        item = program
        while item < num_pairs * chosen_slots:
            pair = item // chosen_slots
            position = load_position(POSITION, pair, G)
            q = load_query(Q, pair, HG, D, ROWS)
            if STEP == ALL_STEPS:
                _await(_counter(COUNTER, pair, 2), tiles)
            chosen_slice(
                K_CHOSEN, V_CHOSEN, BEST, IDS, PEAK, TOTAL, PART, COUNT, item % chosen_slots,
                pair, position, q, chosen_rows, num_slots, cached_slots, qk_scale,
                BLOCK, CHOSEN, KEEP, RANKED, SHARE, G, HG, D, E, ROWS, KEYS, STAGES, COUNTED,
            )  # fmt: skip
            if STEP == ALL_STEPS:
                _report(_counter(COUNTER, pair, 3))
            item += programs
    if STEP == ALL_STEPS or STEP == 4:
        PARTS: tl.constexpr = E // COLUMNS
        item = program
        while item < num_pairs * HG * PARTS:
            row = item // PARTS
            pair = row // HG
            compressed, chosen, window = load_gates(GATE, row)
            if STEP == ALL_STEPS:
                _await(_counter(COUNTER, pair, 3), chosen_slots)
            merge_columns(
                PEAK, TOTAL, PART, OUT, row, item % PARTS * COLUMNS, compressed, chosen, window,
                num_slots, span_slots, window_slots, HG, E, SLOTS, COLUMNS,
            )  # fmt: skip
            if STEP == ALL_STEPS:
                _leave(COUNTER, pair, HG * PARTS)
            item += programs
