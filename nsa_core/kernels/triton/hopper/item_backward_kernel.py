"""Backward of work items on Hopper in Gluon: warps that gather rows beside warps that multiply.

Persistent. A program has two lanes, each a partition that gathers and a warpgroup, and a lane walks
over items of its own: up to `item_queries` tokens that chose one block of 64 keys, HG rows a
token. The rows of an item lie anywhere, so the gatherer asks for several tiles of 64 rows ahead of
the products (a ring of q, grad, offset, delta), and for the keys and values of the next item.
Scores have keys as rows, S = K Q^T, so that P and dS are register operands of dv and dk; dS passes
through shared memory once, for dq, which is added in float32 atomics as dk and dv are.

Rows behind an item's end are zeros in all four: then P is 1, but grad, dP and dS are 0, and nothing
is added to dk and dv. A NaN in K or V makes NaN of the keys that it belongs to, as it does anyway.

Copies and proxies: `cp.async` writes shared memory as ordinary stores do (generic proxy), wgmma
reads it by the async proxy. Each gathering thread's arrival at a barrier is counted when its copies
have landed; a warpgroup that has seen the barrier flip has them before it in order, and its own
`fence.proxy.async` puts its products behind them. The other way round nothing is needed: products
have read a tile when the warpgroup has waited for them, and only then is the tile given back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa_core.kernels.triton.hopper.ring import advance, product_layout

LANES = gl.constexpr(2)


@gluon.jit
def find_item(
    item, OFFSET, ITEM_OFFSET, ITEM_LIST, DOCUMENT, CU, num_slots, item_queries, G: gl.constexpr
):
    """(first entry, queries, group, first token of the document, first key) of an item."""
    key = gl.load(ITEM_LIST + item)
    begin = gl.load(OFFSET + key) + (item - gl.load(ITEM_OFFSET + key)) * item_queries
    queries = gl.minimum(gl.load(OFFSET + key + 1) - begin, item_queries)
    slot = key % num_slots
    document = gl.load(DOCUMENT + slot)
    start = gl.load(CU + document)
    key_row = start + (slot - start // 64 - document) * 64
    return begin, queries, (key // num_slots) % G, start, key_row


@gluon.jit
def find_rows(
    ENTRIES, begin, queries, row, start, G: gl.constexpr, HG: gl.constexpr, CHOSEN: gl.constexpr
):
    """(head row from the document's start and the group, valid) of an item's rows."""
    valid = row < queries * HG
    entry = gl.load(ENTRIES + begin + row // HG, mask=valid, other=start * CHOSEN).to(gl.uint32)
    return ((entry // CHOSEN).to(gl.int32) - start) * (G * HG) + row % HG, valid


@gluon.jit
def gather_items(
    lane: gl.constexpr, Q, K, V, GRAD, ROW_OFFSET, DELTA, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES,
    DOCUMENT, CU, q_ring, grad_ring, offset_ring, delta_ring, k_tiles, v_tiles, filled, emptied,
    keys_filled, keys_emptied, num_items, num_slots, item_queries,
    G: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, CHOSEN: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Bring keys and values of every item of a lane, and the rows of its tiles."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    key_slot = gl.to_tensor(0)
    key_phase = gl.to_tensor(0)
    step = gl.num_programs(0) * LANES
    for item in range(gl.program_id(0) * LANES + lane, num_items, step):
        begin, queries, g, start, key_row = find_item(
            item, OFFSET, ITEM_OFFSET, ITEM_LIST, DOCUMENT, CU, num_slots, item_queries, G
        )
        at = lane * KEY_STAGES + key_slot
        mbarrier.wait(keys_emptied.index(at), key_phase ^ 1)
        tile = (key_row.to(gl.int64) * G + g) * D
        within = key[:, None] * (G * D) + d[None, :]
        async_copy.async_copy_global_to_shared(k_tiles.index(at), K + tile + within)
        async_copy.async_copy_global_to_shared(v_tiles.index(at), V + tile + within)
        async_copy.mbarrier_arrive(keys_filled.index(at), increment_count=False)
        key_slot, key_phase = advance(key_slot, key_phase, KEY_STAGES)
        head_row = start.to(gl.int64) * (G * HG) + g * HG
        for row0 in range(0, queries * HG, BM):
            local, valid = find_rows(ENTRIES, begin, queries, row0 + r, start, G, HG, CHOSEN)
            one = row0 + gl.arange(0, BM, layout=line)
            term, has_term = find_rows(ENTRIES, begin, queries, one, start, G, HG, CHOSEN)
            into = lane * STAGES + slot
            mbarrier.wait(emptied.index(into), phase ^ 1)
            place = local[:, None] * D + d[None, :]
            held = valid[:, None]
            async_copy.async_copy_global_to_shared(
                q_ring.index(into), Q + head_row * D + place, mask=held
            )
            async_copy.async_copy_global_to_shared(
                grad_ring.index(into), GRAD + head_row * D + place, mask=held
            )
            async_copy.async_copy_global_to_shared(
                offset_ring.index(into), ROW_OFFSET + head_row + term, mask=has_term
            )
            async_copy.async_copy_global_to_shared(
                delta_ring.index(into), DELTA + head_row + term, mask=has_term
            )
            async_copy.mbarrier_arrive(filled.index(into), increment_count=False)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def multiply_items(
    lane: gl.constexpr, DQ, DK, DV, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DOCUMENT, CU,
    q_ring, grad_ring, offset_ring, delta_ring, k_tiles, v_tiles, ds_tiles, filled, emptied,
    keys_filled, keys_emptied, num_items, num_slots, item_queries, qk_scale, scale,
    G: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, CHOSEN: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """dk, dv and dq of every item of a lane: what one warpgroup does."""
    s_layout: gl.constexpr = product_layout(BM)
    sum_layout: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    # As `sum_layout`, but columns that a thread holds have changed places with its neighbours':
    # four numbers in a row for one add, and a run of 64 bytes for four threads, or a line of 128
    # for eight, which costs more shuffles.
    runs: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [BM, D],
    )  # fmt: skip
    lines: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [1, 0], [0, 32]], [[0, 8], [0, 4], [0, 16], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [BM, D],
    )  # fmt: skip
    add_layout: gl.constexpr = lines if LINES else runs
    r = gl.arange(0, BM, layout=gl.SliceLayout(1, add_layout))
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, add_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, add_layout))
    zero = gl.full([64, BM], 0.0, gl.float32, s_layout)
    zero_dq = gl.full([BM, D], 0.0, gl.float32, sum_layout)
    ds_tile = ds_tiles.index(lane)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    key_slot = gl.to_tensor(0)
    key_phase = gl.to_tensor(0)
    step = gl.num_programs(0) * LANES
    for item in range(gl.program_id(0) * LANES + lane, num_items, step):
        begin, queries, g, start, key_row = find_item(
            item, OFFSET, ITEM_OFFSET, ITEM_LIST, DOCUMENT, CU, num_slots, item_queries, G
        )
        head_row = start.to(gl.int64) * (G * HG) + g * HG
        at = lane * KEY_STAGES + key_slot
        k = k_tiles.index(at)
        v = v_tiles.index(at)
        mbarrier.wait(keys_filled.index(at), key_phase)
        dk = gl.full([64, D], 0.0, gl.float32, sum_layout)
        dv = gl.full([64, D], 0.0, gl.float32, sum_layout)
        for row0 in range(0, queries * HG, BM):
            local, valid = find_rows(ENTRIES, begin, queries, row0 + r, start, G, HG, CHOSEN)
            own = lane * STAGES + slot
            q = q_ring.index(own)
            grad = grad_ring.index(own)
            mbarrier.wait(filled.index(own), phase)
            fence_async_shared()
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
            offset = offset_ring.index(own).load(columns)
            delta = delta_ring.index(own).load(columns)
            s = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(s * qk_scale - offset[None, :])
            p_operand = gl.convert_layout(p.to(q.dtype), operand)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            dv = warpgroup_mma(p_operand, grad, dv, is_async=True)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            ds_tile.store(ds)
            ds_operand = gl.convert_layout(ds, operand)
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            fence_async_shared()
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
            dv, dk, dq = warpgroup_mma_wait(0, deps=(dv, dk, dq))
            mbarrier.arrive(emptied.index(own), count=1)
            slot, phase = advance(slot, phase, STAGES)
            target = DQ + head_row * D + (local[:, None] * D + d[None, :])
            dq = gl.convert_layout(dq * scale, add_layout)
            gl.atomic_add(target, dq, mask=valid[:, None], sem="relaxed")
        mbarrier.arrive(keys_emptied.index(at), count=1)
        key_slot, key_phase = advance(key_slot, key_phase, KEY_STAGES)
        tile = (key_row.to(gl.int64) * G + g) * D + (key[:, None] * (G * D) + d[None, :])
        gl.atomic_add(DK + tile, gl.convert_layout(dk, add_layout), sem="relaxed")
        gl.atomic_add(DV + tile, gl.convert_layout(dv, add_layout), sem="relaxed")


@gluon.jit(do_not_specialize=["num_lists", "num_slots", "item_queries"])
def hopper_item_backward_kernel(
    Q, K, V, GRAD, ROW_OFFSET, DELTA, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DQ, DK, DV,
    DOCUMENT, CU, num_lists, num_slots, item_queries, qk_scale, scale,
    G: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, CHOSEN: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr,
    REGISTERS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Add dq [N, H, D], dk and dv [N, G, D] of all items; dk is not scaled yet."""
    dtype: gl.constexpr = Q.dtype.element_ty
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    num_items = gl.load(ITEM_OFFSET + num_lists)
    q_ring = gl.allocate_shared_memory(dtype, [LANES * STAGES, BM, D], tiled)
    grad_ring = gl.allocate_shared_memory(dtype, [LANES * STAGES, BM, D], tiled)
    k_tiles = gl.allocate_shared_memory(dtype, [LANES * KEY_STAGES, 64, D], tiled)
    v_tiles = gl.allocate_shared_memory(dtype, [LANES * KEY_STAGES, 64, D], tiled)
    ds_tiles = gl.allocate_shared_memory(dtype, [LANES, 64, BM], tiled)
    offset_ring = gl.allocate_shared_memory(gl.float32, [LANES * STAGES, BM], plain)
    delta_ring = gl.allocate_shared_memory(gl.float32, [LANES * STAGES, BM], plain)
    filled = gl.allocate_shared_memory(gl.int64, [LANES * STAGES, 1], barriers)
    emptied = gl.allocate_shared_memory(gl.int64, [LANES * STAGES, 1], barriers)
    keys_filled = gl.allocate_shared_memory(gl.int64, [LANES * KEY_STAGES, 1], barriers)
    keys_emptied = gl.allocate_shared_memory(gl.int64, [LANES * KEY_STAGES, 1], barriers)
    for i in gl.static_range(LANES * STAGES):
        mbarrier.init(filled.index(i), count=32 * WARPS)
        mbarrier.init(emptied.index(i), count=1)
    for i in gl.static_range(LANES * KEY_STAGES):
        mbarrier.init(keys_filled.index(i), count=32 * WARPS)
        mbarrier.init(keys_emptied.index(i), count=1)
    # A tuple of constants that has a name would hold tensors: each is written out.
    gl.warp_specialize([
        (multiply_items, (
            0, DQ, DK, DV, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DOCUMENT, CU, q_ring,
            grad_ring, offset_ring, delta_ring, k_tiles, v_tiles, ds_tiles, filled, emptied,
            keys_filled, keys_emptied, num_items, num_slots, item_queries, qk_scale,
            scale, G, HG, D, CHOSEN, BM, STAGES, KEY_STAGES, LINES,
        )),
        (multiply_items, (
            1, DQ, DK, DV, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DOCUMENT, CU, q_ring,
            grad_ring, offset_ring, delta_ring, k_tiles, v_tiles, ds_tiles, filled, emptied,
            keys_filled, keys_emptied, num_items, num_slots, item_queries, qk_scale,
            scale, G, HG, D, CHOSEN, BM, STAGES, KEY_STAGES, LINES,
        )),
        (gather_items, (
            0, Q, K, V, GRAD, ROW_OFFSET, DELTA, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DOCUMENT,
            CU, q_ring, grad_ring, offset_ring, delta_ring, k_tiles, v_tiles, filled, emptied,
            keys_filled, keys_emptied, num_items, num_slots, item_queries,
            G, HG, D, CHOSEN, BM, STAGES, KEY_STAGES, WARPS,
        )),
        (gather_items, (
            1, Q, K, V, GRAD, ROW_OFFSET, DELTA, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DOCUMENT,
            CU, q_ring, grad_ring, offset_ring, delta_ring, k_tiles, v_tiles, filled, emptied,
            keys_filled, keys_emptied, num_items, num_slots, item_queries,
            G, HG, D, CHOSEN, BM, STAGES, KEY_STAGES, WARPS,
        )),
    ], [4, WARPS, WARPS], [REGISTERS, GATHER_REGISTERS, GATHER_REGISTERS])  # fmt: skip
