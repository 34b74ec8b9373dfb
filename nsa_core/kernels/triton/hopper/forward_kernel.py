"""The forward of a branch on Hopper in Gluon: one warp copies tiles, two warpgroups attend.

Persistent. A work item is 64 tokens of two heads of one group; a warpgroup owns a head, and both
share the tiles of keys and values that the copying warp brings by TMA. In a warpgroup the scores of
the next tile and the sum of this one's values are made under the exponentials of the next.

What a row sees, and what hides that a value is not finite, is as in `attend.py`: K and V rows that
no row of a tile may see reach it as zero probabilities, and 0 times NaN would be NaN. So values of
tiles that the causal limit cuts are mended in shared memory (`ring.hide_broken`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa_core.kernels.triton.hopper.ring import advance, hide_broken, product_layout
from nsa_core.kernels.triton.rows import (
    CHOSEN,
    COMPRESSED,
    INFINITY,
    LN2,
    LOWEST,
    SLIDING,
    UNREACHED,
)


@gluon.jit
def visible_keys(position, MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr):
    """Number of keys, counted from the first, that a token at `position` may see."""
    if MODE == COMPRESSED:
        keys = gl.maximum(position - SPAN + 1 + STRIDE, 0) // STRIDE
    else:
        keys = position + 1
    return keys


@gluon.jit
def find_item(
    item, DOCUMENT, CU, num_slots,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PAIRS: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """A work item: slot, head, row, first key, place in its document, its tiles as `row_limits`."""
    slot = num_slots - 1 - gl.minimum(item // PAIRS, num_slots - 1)
    head = (item % PAIRS) * 2
    document = gl.load(DOCUMENT + slot)
    start = gl.load(CU + document)
    length = gl.load(CU + document + 1) - start
    first = (slot - start // 64 - document) * 64
    last = gl.minimum(first + 63, length - 1)
    exists = first < length
    full_end = visible_keys(first, MODE, SPAN, STRIDE) // BN
    end = gl.where(exists, gl.cdiv(visible_keys(last, MODE, SPAN, STRIDE), BN), 0)
    begin = gl.to_tensor(0)
    low_end = gl.to_tensor(0)
    if MODE == SLIDING:
        begin = gl.where(exists, gl.maximum(first - SPAN + 1, 0) // BN, 0)
        low_end = gl.cdiv(gl.maximum(last - SPAN + 1, 0), BN)
    return slot, head, start + first, start // STRIDE, first, length, begin, low_end, full_end, end


@gluon.jit
def copy_pairs(
    q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled, k_emptied,
    v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PAIRS: gl.constexpr,
    HG: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the two heads of every work item, then the tiles of keys and values that they see."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_slot = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _, head, row, key_row, _, _, begin, _, _, end = find_item(
            item, DOCUMENT, CU, num_slots, MODE, SPAN, STRIDE, PAIRS, BN
        )
        column = head // HG * D
        mbarrier.wait(q_emptied.index(q_slot), q_phase ^ 1)
        bar = q_filled.index(q_slot)
        mbarrier.expect(bar, 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [row, (head + half) * D], bar, q_tiles.index(q_slot * 2 + half)
            )
        q_slot, q_phase = advance(q_slot, q_phase, 2)
        for j in range(begin, end):
            key = key_row + j * BN
            mbarrier.wait(k_emptied.index(slot), phase ^ 1)
            mbarrier.expect(k_filled.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [key, column], k_filled.index(slot), k_ring.index(slot)
            )
            mbarrier.wait(v_emptied.index(slot), phase ^ 1)
            mbarrier.expect(v_filled.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [key, column], v_filled.index(slot), v_ring.index(slot)
            )
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def turn_word(word, at, j, num_padded):
    """The word of bits that holds block j, where the one before is `word`."""
    if j % 32 == 0:
        word = gl.load(at + (j // 32).to(gl.int64) * num_padded)
    return word


@gluon.jit
def fold_scores(
    s, peak, sums, word, j, low_end, full_end, position, qk_scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, BN: gl.constexpr,
    s_layout: gl.constexpr,
):  # fmt: skip
    """(probabilities, maximum, sums, decay of earlier sums) with one more tile of scores."""
    chosen = ((word >> (j % 32)) & 1) != 0
    if (j < low_end) | (j >= full_end):
        column = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
        stop = visible_keys(position, MODE, SPAN, STRIDE) - j * BN
        seen = column[None, :] < stop[:, None]
        if MODE == SLIDING:
            seen = seen & (column[None, :] >= (stop - SPAN)[:, None])
        if MODE == CHOSEN:
            seen = seen & chosen[:, None]
        s = gl.where(seen, s, -INFINITY)
    raised = gl.maximum(peak, gl.max(s, 1) * qk_scale)
    if MODE == CHOSEN:
        raised = gl.where(chosen, raised, peak)
        p = gl.exp2(s * qk_scale - gl.where(chosen, raised, INFINITY)[:, None])
    else:
        p = gl.exp2(s * qk_scale - raised[:, None])
    decay = gl.exp2(peak - raised)
    return p, raised, sums * decay + gl.sum(p, 1), decay


@gluon.jit
def attend_head(
    half: gl.constexpr, BITS, OUT, LSE, q_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled,
    k_emptied, v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items, num_words, qk_scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PAIRS: gl.constexpr,
    HG: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One head of every work item: what one warpgroup does."""
    s_layout: gl.constexpr = product_layout(BN)
    out_layout: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_tiles.dtype
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_slot = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    row = gl.arange(0, 64, layout=rows)
    zero = gl.full([64, BN], 0.0, gl.float32, s_layout)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile, head, row0, _, first, length, begin, low_end, full_end, end = find_item(
            item, DOCUMENT, CU, num_slots, MODE, SPAN, STRIDE, PAIRS, BN
        )
        position = first + row
        word = row
        word_row = BITS + head // HG * num_words * (num_slots * 64).to(gl.int64) + tile * 64
        some = begin < end
        if MODE == CHOSEN:
            word = gl.load(word_row + row)
        mbarrier.wait(q_filled.index(q_slot), q_phase)
        q = q_tiles.index(q_slot * 2 + half)
        mbarrier.wait(k_filled.index(slot), phase, pred=some)
        s = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_emptied.index(slot), count=1, pred=some)
        peak = gl.full([64], LOWEST, gl.float32, rows)
        sums = gl.full([64], 0.0, gl.float32, rows)
        p, peak, sums, _ = fold_scores(
            s, peak, sums, word, begin, low_end, full_end, position, qk_scale,
            MODE, SPAN, STRIDE, BN, s_layout,
        )  # fmt: skip
        p_operand = gl.convert_layout(p.to(dtype), operand)
        out = gl.full([64, D], 0.0, gl.float32, out_layout)
        mbarrier.wait(v_filled.index(slot), phase, pred=some)
        for j in range(begin + 1, end):
            if j - 1 >= full_end:
                hide_broken(v_ring.index(slot), D, BN)
            next_slot, next_phase = advance(slot, phase, STAGES)
            mbarrier.wait(k_filled.index(next_slot), next_phase)
            s = warpgroup_mma(
                q, k_ring.index(next_slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            total = warpgroup_mma(p_operand, v_ring.index(slot), out, is_async=True)
            if MODE == CHOSEN:
                word = turn_word(word, word_row + row, j, num_slots * 64)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_emptied.index(next_slot), count=1)
            p, peak, sums, decay = fold_scores(
                s, peak, sums, word, j, low_end, full_end, position, qk_scale,
                MODE, SPAN, STRIDE, BN, s_layout,
            )  # fmt: skip
            # Waiting here keeps ptxas from moving the exponentials behind the products' end.
            mbarrier.wait(v_filled.index(next_slot), next_phase)
            out = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(v_emptied.index(slot), count=1)
            p_operand = gl.convert_layout(p.to(dtype), operand)
            out = out * gl.convert_layout(decay, gl.SliceLayout(1, out_layout))[:, None]
            slot = next_slot
            phase = next_phase
        mbarrier.arrive(q_emptied.index(q_slot), count=1)
        q_slot, q_phase = advance(q_slot, q_phase, 2)
        if end > full_end:
            hide_broken(v_ring.index(slot), D, BN)
        out = warpgroup_mma(p_operand, v_ring.index(slot), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        mbarrier.arrive(v_emptied.index(slot), count=1, pred=some)
        past, past_phase = advance(slot, phase, STAGES)
        slot = gl.where(some, past, slot)
        phase = gl.where(some, past_phase, phase)
        has_key = (sums > 0) & some
        divisor = gl.where(has_key, sums, 1.0)
        lse = gl.where(has_key, (peak + gl.log2(divisor)) * LN2, -INFINITY)
        out = out * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, out_layout))[:, None]
        out = gl.where(gl.abs(out) > UNREACHED, float("nan"), out)
        out = gl.where(some, out, 0.0)
        out = gl.convert_layout(out.to(dtype), stored)
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
        column = gl.arange(0, D, layout=gl.SliceLayout(0, stored))
        base = row0.to(gl.int64) * (2 * PAIRS) + head + half
        at = r[:, None] * (2 * PAIRS * D) + column[None, :]
        gl.store(OUT + base * D + at, out, mask=(first + r < length)[:, None])
        gl.store(LSE + base + row * (2 * PAIRS), lse, mask=position < length)


@gluon.jit(do_not_specialize=["num_slots", "num_items", "num_words"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, BITS, OUT, LSE, DOCUMENT, CU, num_slots, num_items, num_words, qk_scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, G: gl.constexpr,
    HG: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output and log normaliser of 64 tokens of two heads at a time, longest rows first."""
    PAIRS: gl.constexpr = G * HG // 2
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [4, 64, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, D], v_desc.layout)
    q_filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_emptied = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_filled.index(i), count=1)
        mbarrier.init(q_emptied.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_filled.index(i), count=1)
        mbarrier.init(k_emptied.index(i), count=2)
        mbarrier.init(v_filled.index(i), count=1)
        mbarrier.init(v_emptied.index(i), count=2)
    # A tuple of constants that has a name would hold tensors: each is written out.
    gl.warp_specialize([
        (attend_head, (
            0, BITS, OUT, LSE, q_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled, k_emptied,
            v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items, num_words, qk_scale,
            MODE, SPAN, STRIDE, PAIRS, HG, D, BN, STAGES,
        )),
        (attend_head, (
            1, BITS, OUT, LSE, q_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled, k_emptied,
            v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items, num_words, qk_scale,
            MODE, SPAN, STRIDE, PAIRS, HG, D, BN, STAGES,
        )),
        (copy_pairs, (
            q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled,
            k_emptied, v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items,
            MODE, SPAN, STRIDE, PAIRS, HG, D, BN, STAGES,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
