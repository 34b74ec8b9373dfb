"""Dq of all branches on Hopper in Gluon: one warp copies tiles, two or three warpgroups multiply.

Persistent. A work item is 64 tokens of HEADS heads of one group, a warpgroup each. The tiles of
compressed, window and chosen keys run through one ring as one sequence, so that nothing drains
between the branches. A warpgroup waits for its own products; the others multiply meanwhile.

Terms are planes [2 H, padded] as in `key_gradient_kernel.py`, BITS [G words, padded]. Rows of K and
V behind a document's end are cleared in shared memory: what is there may be NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa_core.kernels.triton.hopper.forward_kernel import visible_keys
from nsa_core.kernels.triton.hopper.ring import (
    advance,
    clear_rows,
    count_turns,
    product_layout,
    turn_item,
)
from nsa_core.kernels.triton.rows import COMPRESSED, INFINITY


@gluon.jit
def find_walk(
    item, DOCUMENT, CU, num_slots,
    HAS_CMP: gl.constexpr, HAS_WIN: gl.constexpr, HAS_SLC: gl.constexpr,
    SPAN: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    HEADS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A work item: slot, head, document, and where its walk over the branches' tiles turns.

    Tiles [0, num_cmp) are compressed, from `full_cmp` on cut; [num_cmp, end_win) are the window's,
    of which `begin_win` is the first; [end_win, end) are blocks of the chosen branch.
    """
    PER_SLOT: gl.constexpr = H // HEADS
    slot = num_slots - 1 - item // PER_SLOT
    head = (item % PER_SLOT) * HEADS
    document = gl.load(DOCUMENT + slot)
    start = gl.load(CU + document)
    length = gl.load(CU + document + 1) - start
    first = (slot - start // 64 - document) * 64
    last = gl.minimum(first + 63, length - 1)
    exists = first < length
    num_cmp = gl.to_tensor(0)
    begin_win = gl.to_tensor(0)
    num_win = gl.to_tensor(0)
    num_slc = gl.to_tensor(0)
    if HAS_CMP:
        num_cmp = gl.where(exists, gl.cdiv(visible_keys(last, COMPRESSED, SPAN, STRIDE), BN), 0)
    if HAS_WIN:
        begin_win = gl.maximum(first - WINDOW + 1, 0) // BN
        num_win = gl.where(exists, gl.cdiv(last + 1, BN) - begin_win, 0)
    if HAS_SLC:
        num_slc = gl.where(exists, gl.cdiv(last + 1, BN), 0)
    end_win = num_cmp + num_win
    return slot, head, start, first, length, num_cmp, begin_win, end_win, end_win + num_slc


@gluon.jit
def copy_walk(
    q_desc, grad_desc, k_cmp_desc, v_cmp_desc, k_win_desc, v_win_desc, k_slc_desc, v_slc_desc,
    q_tiles, grad_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled, k_emptied, v_filled,
    v_emptied, DOCUMENT, CU, num_slots, num_items,
    HAS_CMP: gl.constexpr, HAS_WIN: gl.constexpr, HAS_SLC: gl.constexpr,
    SPAN: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    HG: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Bring q and grad of the heads of every work item, then the tiles of its walk."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_slot = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    for turn in range(count_turns(num_items)):
        item = turn_item(turn)
        _, head, start, first, _, num_cmp, begin_win, end_win, end = find_walk(
            item, DOCUMENT, CU, num_slots, HAS_CMP, HAS_WIN, HAS_SLC, SPAN, STRIDE, WINDOW, H,
            HEADS, BN,
        )  # fmt: skip
        column = head // HG * D
        row = start + first
        mbarrier.wait(q_emptied.index(q_slot), q_phase ^ 1)
        bar = q_filled.index(q_slot)
        mbarrier.expect(bar, HEADS * (q_desc.block_type.nbytes + grad_desc.block_type.nbytes))
        for place in gl.static_range(HEADS):
            at = q_slot * HEADS + place
            own = (head + place) * D
            tma.async_copy_global_to_shared(q_desc, [row, own], bar, q_tiles.index(at))
            tma.async_copy_global_to_shared(grad_desc, [row, own], bar, grad_tiles.index(at))
        q_slot, q_phase = advance(q_slot, q_phase, Q_STAGES)
        for t in range(end):
            mbarrier.wait(k_emptied.index(slot), phase ^ 1)
            k_bar = k_filled.index(slot)
            mbarrier.expect(k_bar, k_cmp_desc.block_type.nbytes)
            mbarrier.wait(v_emptied.index(slot), phase ^ 1)
            v_bar = v_filled.index(slot)
            mbarrier.expect(v_bar, v_cmp_desc.block_type.nbytes)
            k_tile = k_ring.index(slot)
            v_tile = v_ring.index(slot)
            if t < num_cmp:
                key = start // STRIDE + t * BN
                tma.async_copy_global_to_shared(k_cmp_desc, [key, column], k_bar, k_tile)
                tma.async_copy_global_to_shared(v_cmp_desc, [key, column], v_bar, v_tile)
            elif t < end_win:
                key = start + (begin_win + t - num_cmp) * BN
                tma.async_copy_global_to_shared(k_win_desc, [key, column], k_bar, k_tile)
                tma.async_copy_global_to_shared(v_win_desc, [key, column], v_bar, v_tile)
            else:
                key = start + (t - end_win) * BN
                tma.async_copy_global_to_shared(k_slc_desc, [key, column], k_bar, k_tile)
                tma.async_copy_global_to_shared(v_slc_desc, [key, column], v_bar, v_tile)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def held_keys(
    t, num_cmp, begin_win, end_win, length, SPAN: gl.constexpr, STRIDE: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Keys of the document that tile t of a walk and those behind it hold."""
    in_cmp = gl.maximum(length - SPAN + STRIDE, 0) // STRIDE - t * BN
    in_win = length - (begin_win + t - num_cmp) * BN
    in_slc = length - (t - end_win) * BN
    return gl.where(t < num_cmp, in_cmp, gl.where(t < end_win, in_win, in_slc))


@gluon.jit
def clear_pair(k, v, k_filled, v_filled, phase, held, D: gl.constexpr, BN: gl.constexpr):
    """Clear the rows of both tiles behind a document's end, once they have come."""
    mbarrier.wait(k_filled, phase)
    mbarrier.wait(v_filled, phase)
    clear_rows(k, held, D, BN)
    clear_rows(v, held, D, BN)
    fence_async_shared()


@gluon.jit
def walk_head(
    place: gl.constexpr, DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, q_tiles, grad_tiles, k_ring,
    v_ring, q_filled, q_emptied, k_filled, k_emptied, v_filled, v_emptied, DOCUMENT, CU,
    num_slots, num_items, num_words, qk_scale, scale,
    HAS_CMP: gl.constexpr, HAS_WIN: gl.constexpr, HAS_SLC: gl.constexpr,
    SPAN: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    HG: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Dq of one head of every work item: what one warpgroup does."""
    s_layout: gl.constexpr = product_layout(BN)
    sum_layout: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    num_padded = num_slots * 64
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_slot = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    zero = gl.full([64, BN], 0.0, gl.float32, s_layout)
    row = gl.arange(0, 64, layout=rows)
    for turn in range(count_turns(num_items)):
        item = turn_item(turn)
        tile, head, start, first, length, num_cmp, begin_win, end_win, end = find_walk(
            item, DOCUMENT, CU, num_slots, HAS_CMP, HAS_WIN, HAS_SLC, SPAN, STRIDE, WINDOW, H,
            HEADS, BN,
        )  # fmt: skip
        position = first + row
        at = (head + place) * num_padded.to(gl.int64) + tile * 64 + row
        plane = H * num_padded.to(gl.int64)
        full_cmp = visible_keys(first, COMPRESSED, SPAN, STRIDE) // BN
        stop_cmp = visible_keys(position, COMPRESSED, SPAN, STRIDE)
        low_win = gl.cdiv(gl.maximum(gl.minimum(first + 63, length - 1) - WINDOW + 1, 0), BN)
        full_end = (first + 1) // BN
        offset_cmp = gl.load(TERMS_CMP + at)
        delta_cmp = gl.load(TERMS_CMP + plane + at)
        offset_win = gl.load(TERMS_WIN + at)
        delta_win = gl.load(TERMS_WIN + plane + at)
        offset_slc = offset_win
        delta_slc = delta_win
        word = row
        word_row = BITS + head // HG * num_words * num_padded.to(gl.int64) + tile * 64
        if HAS_SLC:
            offset_slc = gl.load(TERMS_SLC + at)
            delta_slc = gl.load(TERMS_SLC + plane + at)
            word = gl.load(word_row + row)
        mbarrier.wait(q_filled.index(q_slot), q_phase)
        q = q_tiles.index(q_slot * HEADS + place)
        grad = grad_tiles.index(q_slot * HEADS + place)
        dq = gl.full([64, D], 0.0, gl.float32, sum_layout)
        for t in range(end):
            held = held_keys(t, num_cmp, begin_win, end_win, length, SPAN, STRIDE, BN)
            if held < BN:
                clear_pair(
                    k_ring.index(slot), v_ring.index(slot), k_filled.index(slot),
                    v_filled.index(slot), phase, held, D, BN,
                )  # fmt: skip
            mbarrier.wait(k_filled.index(slot), phase)
            s = warpgroup_mma(
                q, k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            mbarrier.wait(v_filled.index(slot), phase)
            dp = warpgroup_mma(
                grad, v_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(1, deps=(s,))
            is_cmp = t < num_cmp
            is_win = t < end_win
            j = gl.where(is_cmp, t, gl.where(is_win, begin_win + t - num_cmp, t - end_win))
            offset = gl.where(is_cmp, offset_cmp, offset_win)
            delta = gl.where(is_cmp, delta_cmp, delta_win)
            if HAS_SLC:
                if (not is_win) & (j % 32 == 0) & (j > 0):
                    word = gl.load(word_row + (j // 32).to(gl.int64) * num_padded + row)
                chosen = ((word >> (j % 32)) & 1) != 0
                offset = gl.where(is_win, offset, gl.where(chosen, offset_slc, INFINITY))
                delta = gl.where(is_win, delta, delta_slc)
            p = gl.exp2(s * qk_scale - offset[:, None])
            is_cut = gl.where(
                is_cmp, j >= full_cmp, (j >= full_end) | (is_win & (j < low_win))
            )  # fmt: skip
            if is_cut:
                column = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
                stop = gl.where(is_cmp, stop_cmp, position + 1) - j * BN
                low = gl.where(is_win & (not is_cmp), stop - WINDOW, 0)
                p = gl.where(
                    (column[None, :] < stop[:, None]) & (column[None, :] >= low[:, None]), p, 0.0
                )
            dp = warpgroup_mma_wait(0, deps=(dp,))
            mbarrier.arrive(v_emptied.index(slot), count=1)
            ds = p * (dp - delta[:, None])
            ds_operand = gl.convert_layout(ds.to(q_tiles.dtype), operand)
            dq = warpgroup_mma(ds_operand, k_ring.index(slot), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(k_emptied.index(slot), count=1)
            slot, phase = advance(slot, phase, STAGES)
        mbarrier.arrive(q_emptied.index(q_slot), count=1)
        q_slot, q_phase = advance(q_slot, q_phase, Q_STAGES)
        out = gl.convert_layout((dq * scale).to(DQ.dtype.element_ty), stored)
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, stored))
        base = ((start + first).to(gl.int64) * H + head + place) * D
        into = base + (r[:, None] * (H * D) + d[None, :])
        gl.store(DQ + into, out, mask=(first + r < length)[:, None])


@gluon.jit(do_not_specialize=["num_slots", "num_items", "num_words"])
def hopper_query_gradient_kernel(
    q_desc, grad_desc, k_cmp_desc, v_cmp_desc, k_win_desc, v_win_desc, k_slc_desc, v_slc_desc,
    DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, DOCUMENT, CU,
    num_slots, num_items, num_words, qk_scale, scale,
    HAS_CMP: gl.constexpr, HAS_WIN: gl.constexpr, HAS_SLC: gl.constexpr,
    SPAN: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, G: gl.constexpr,
    HG: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Dq of 64 tokens of HEADS heads at a time, summed over the branches that it HAS."""
    gl.static_assert(HEADS == 2 or HEADS == 3)
    H: gl.constexpr = G * HG
    ROWS: gl.constexpr = HEADS * Q_STAGES
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [ROWS, 64, D], q_desc.layout)
    grad_tiles = gl.allocate_shared_memory(grad_desc.dtype, [ROWS, 64, D], grad_desc.layout)
    k_ring = gl.allocate_shared_memory(k_cmp_desc.dtype, [STAGES, BN, D], k_cmp_desc.layout)
    v_ring = gl.allocate_shared_memory(v_cmp_desc.dtype, [STAGES, BN, D], v_cmp_desc.layout)
    q_filled = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_emptied = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_filled.index(i), count=1)
        mbarrier.init(q_emptied.index(i), count=HEADS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_filled.index(i), count=1)
        mbarrier.init(k_emptied.index(i), count=HEADS)
        mbarrier.init(v_filled.index(i), count=1)
        mbarrier.init(v_emptied.index(i), count=HEADS)
    # A tuple of constants that has a name would hold tensors: each is written out.
    if HEADS == 3:
        gl.warp_specialize([
            (walk_head, (
                0, DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, q_tiles, grad_tiles, k_ring, v_ring,
                q_filled, q_emptied, k_filled, k_emptied, v_filled, v_emptied, DOCUMENT, CU,
                num_slots, num_items, num_words, qk_scale, scale, HAS_CMP, HAS_WIN, HAS_SLC, SPAN,
                STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
            (walk_head, (
                1, DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, q_tiles, grad_tiles, k_ring, v_ring,
                q_filled, q_emptied, k_filled, k_emptied, v_filled, v_emptied, DOCUMENT, CU,
                num_slots, num_items, num_words, qk_scale, scale, HAS_CMP, HAS_WIN, HAS_SLC, SPAN,
                STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
            (walk_head, (
                2, DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, q_tiles, grad_tiles, k_ring, v_ring,
                q_filled, q_emptied, k_filled, k_emptied, v_filled, v_emptied, DOCUMENT, CU,
                num_slots, num_items, num_words, qk_scale, scale, HAS_CMP, HAS_WIN, HAS_SLC, SPAN,
                STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
            (copy_walk, (
                q_desc, grad_desc, k_cmp_desc, v_cmp_desc, k_win_desc, v_win_desc, k_slc_desc,
                v_slc_desc, q_tiles, grad_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled,
                k_emptied, v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items, HAS_CMP,
                HAS_WIN, HAS_SLC, SPAN, STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (walk_head, (
                0, DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, q_tiles, grad_tiles, k_ring, v_ring,
                q_filled, q_emptied, k_filled, k_emptied, v_filled, v_emptied, DOCUMENT, CU,
                num_slots, num_items, num_words, qk_scale, scale, HAS_CMP, HAS_WIN, HAS_SLC, SPAN,
                STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
            (walk_head, (
                1, DQ, TERMS_CMP, TERMS_WIN, TERMS_SLC, BITS, q_tiles, grad_tiles, k_ring, v_ring,
                q_filled, q_emptied, k_filled, k_emptied, v_filled, v_emptied, DOCUMENT, CU,
                num_slots, num_items, num_words, qk_scale, scale, HAS_CMP, HAS_WIN, HAS_SLC, SPAN,
                STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
            (copy_walk, (
                q_desc, grad_desc, k_cmp_desc, v_cmp_desc, k_win_desc, v_win_desc, k_slc_desc,
                v_slc_desc, q_tiles, grad_tiles, k_ring, v_ring, q_filled, q_emptied, k_filled,
                k_emptied, v_filled, v_emptied, DOCUMENT, CU, num_slots, num_items, HAS_CMP,
                HAS_WIN, HAS_SLC, SPAN, STRIDE, WINDOW, H, HG, HEADS, D, BN, STAGES, Q_STAGES,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
