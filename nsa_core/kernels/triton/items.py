"""KV-major attention over work items: one KV block and some of the queries that chose it.

Forward writes a normalised partial output and its log2 normaliser per (token, chosen block, head);
`merge.py` adds the bands and merges. Backward makes dk, dv and dq of an item in one pass.
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.document_slots import locate
from nsa_core.kernels.triton.rows import INFINITY, key_gradient_step, matmul


@triton.jit
def open_item(
    OFFSET, ITEM_OFFSET, ITEM_LIST, DOCUMENT, CU, item, num_slots, item_queries,
    BLOCK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """(first entry, queries, group, first token of the document, first key) of an item."""
    key = tl.load(ITEM_LIST + item)
    begin = tl.load(OFFSET + key) + (item - tl.load(ITEM_OFFSET + key)) * item_queries
    queries = tl.minimum(tl.load(OFFSET + key + 1) - begin, item_queries)
    slot = key % num_slots
    g = (key // num_slots) % G
    start, _, block = locate(DOCUMENT, CU, slot, BLOCK)
    return begin, queries, g, start, (start + block * BLOCK).to(tl.int64)


@triton.jit
def chunk_start(DOCUMENT, CU, slot, BLOCK: tl.constexpr):
    """First token of the first query block at or after a slot."""
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    return start + tl.minimum(block * BLOCK, length)


@triton.jit
def item_rows(
    ENTRIES, begin, queries, row, start, G: tl.constexpr, HG: tl.constexpr, CHOSEN: tl.constexpr
):
    """(entry, head row from the document's start and the group, valid) of an item's rows."""
    valid = row < queries * HG
    entry = tl.load(ENTRIES + begin + row // HG, mask=valid, other=start * CHOSEN)
    entry = entry.to(tl.uint32)  # a division without the correction for a sign
    return entry, ((entry // CHOSEN).to(tl.int32) - start) * (G * HG) + row % HG, valid


@triton.jit
def partial_row(token, column, head, g, G: tl.constexpr, HG: tl.constexpr, CHOSEN: tl.constexpr):
    """Row of the partial buffers [chunk tokens, G, CHOSEN, HG]."""
    return ((token * G + g) * CHOSEN + column) * HG + head


@triton.jit(
    do_not_specialize=["first_list", "last_list", "first_slot", "num_slots", "item_queries"]
)
def item_forward_kernel(
    Q, K, V, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, PART_OUT, PART_LSE, DOCUMENT, CU,
    first_list, last_list, first_slot, num_slots, item_queries, qk_scale,
    BLOCK: tl.constexpr, G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CHOSEN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial outputs of one item of one chunk; the grid is a bound, surplus programs return."""
    item = tl.load(ITEM_OFFSET + first_list) + tl.program_id(0)
    if item >= tl.load(ITEM_OFFSET + last_list):
        return
    begin, queries, g, start, key_row = open_item(
        OFFSET, ITEM_OFFSET, ITEM_LIST, DOCUMENT, CU, item, num_slots, item_queries, BLOCK, G
    )
    head_row = start.to(tl.int64) * (G * HG) + g * HG
    token0 = chunk_start(DOCUMENT, CU, first_slot, BLOCK)
    kk = tl.arange(0, BLOCK)
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    k = tl.load(K + (key_row * G + g) * D + kk[:, None] * (G * D) + dd[None, :])
    v = tl.load(V + (key_row * G + g) * E + kk[:, None] * (G * E) + ee[None, :])
    for row0 in tl.range(0, queries * HG, BM, num_stages=STAGES):
        row = row0 + tl.arange(0, BM)
        entry, local, valid = item_rows(ENTRIES, begin, queries, row, start, G, HG, CHOSEN)
        q_row = Q + head_row * D + local[:, None] * D + dd[None, :]
        q = tl.load(q_row, mask=valid[:, None], other=0.0)
        scores = matmul(q, tl.trans(k))
        peak = tl.max(scores, 1) * qk_scale
        prob = tl.exp2(scores * qk_scale - peak[:, None])
        total = tl.sum(prob, 1)
        out = matmul(prob.to(v.dtype), v) * (1.0 / total)[:, None]
        token, column = (entry // CHOSEN).to(tl.int32) - token0, (entry % CHOSEN).to(tl.int32)
        at = partial_row(token, column, row % HG, g, G, HG, CHOSEN)
        target = PART_OUT + at[:, None] * E + ee[None, :]
        tl.store(target, out.to(PART_OUT.dtype.element_ty), mask=valid[:, None])
        tl.store(PART_LSE + at, peak + tl.log2(total), mask=valid)


@triton.jit(
    do_not_specialize=["first_list", "last_list", "first_slot", "num_slots", "item_queries"]
)
def item_backward_kernel(
    Q, K, V, GRAD, ROW_OFFSET, DELTA, OFFSET, ITEM_OFFSET, ITEM_LIST, ENTRIES, DQ, DK, DV,
    DOCUMENT, CU, first_list, last_list, first_slot, num_slots, item_queries, qk_scale, scale,
    BLOCK: tl.constexpr, G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CHOSEN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    ATOMIC_DQ: tl.constexpr, ATOMIC_DKV: tl.constexpr,
):  # fmt: skip
    """dk, dv, dq of one item.

    ATOMIC_DQ adds to DQ [N, H, D] in float32; without it DQ is a partial per (token, chosen block,
    head) that `merge.py` sums. ATOMIC_DKV adds to DK, DV [N, G, ...]; without it they are one copy
    per item, which `sum_items_kernel` adds in order. dk is not scaled yet.
    """
    first_item = tl.load(ITEM_OFFSET + first_list)
    item = first_item + tl.program_id(0)
    if item >= tl.load(ITEM_OFFSET + last_list):
        return
    begin, queries, g, start, key_row = open_item(
        OFFSET, ITEM_OFFSET, ITEM_LIST, DOCUMENT, CU, item, num_slots, item_queries, BLOCK, G
    )
    head_row = start.to(tl.int64) * (G * HG) + g * HG
    token0 = chunk_start(DOCUMENT, CU, first_slot, BLOCK)
    kk = tl.arange(0, BLOCK)
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    k_tile = (key_row * G + g) * D + kk[:, None] * (G * D) + dd[None, :]
    v_tile = (key_row * G + g) * E + kk[:, None] * (G * E) + ee[None, :]
    k = tl.load(K + k_tile)
    v = tl.load(V + v_tile)
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, E], tl.float32)
    for row0 in tl.range(0, queries * HG, BM, num_stages=STAGES):
        row = row0 + tl.arange(0, BM)
        entry, local, valid = item_rows(ENTRIES, begin, queries, row, start, G, HG, CHOSEN)
        q_row = Q + head_row * D + local[:, None] * D + dd[None, :]
        q = tl.load(q_row, mask=valid[:, None], other=0.0)
        grad_row = GRAD + head_row * E + local[:, None] * E + ee[None, :]
        grad = tl.load(grad_row, mask=valid[:, None], other=0.0)
        offset = tl.load(ROW_OFFSET + head_row + local, mask=valid, other=INFINITY)
        delta = tl.load(DELTA + head_row + local, mask=valid, other=0.0)
        dk, dv, ds = key_gradient_step(
            q, grad, offset[None, :], delta, k, v, qk_scale, dk, dv, valid[None, :], False
        )
        dq = matmul(tl.trans(ds), k) * scale
        if ATOMIC_DQ:
            target = DQ + head_row * D + local[:, None] * D + dd[None, :]
            tl.atomic_add(target, dq, mask=valid[:, None], sem="relaxed")
        else:
            token, column = (entry // CHOSEN).to(tl.int32) - token0, (entry % CHOSEN).to(tl.int32)
            at = partial_row(token, column, row % HG, g, G, HG, CHOSEN)
            target = DQ + at[:, None] * D + dd[None, :]
            tl.store(target, dq.to(DQ.dtype.element_ty), mask=valid[:, None])
    if ATOMIC_DKV:
        tl.atomic_add(DK + k_tile, dk, sem="relaxed")
        tl.atomic_add(DV + v_tile, dv, sem="relaxed")
    else:
        copy = tl.program_id(0).to(tl.int64) * BLOCK
        tl.store(DK + (copy + kk)[:, None] * D + dd[None, :], dk)
        tl.store(DV + (copy + kk)[:, None] * E + ee[None, :], dv)


@triton.jit(do_not_specialize=["first_list", "num_slots"])
def sum_items_kernel(
    ITEM_OFFSET, PART_DK, PART_DV, DK, DV, DOCUMENT, CU, first_list, num_slots,
    BLOCK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Add the per-item copies of a chunk to the accumulators, list by list, in item order."""
    slot = tl.program_id(0)
    g = tl.program_id(1)
    key = first_list + g * num_slots + slot
    first_item = tl.load(ITEM_OFFSET + first_list)
    begin = tl.load(ITEM_OFFSET + key) - first_item
    end = tl.load(ITEM_OFFSET + key + 1) - first_item
    if begin == end:
        return
    start, _, block = locate(DOCUMENT, CU, slot, BLOCK)
    key_row = (start + block * BLOCK).to(tl.int64) * G + g
    kk = tl.arange(0, BLOCK)
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    k_tile = DK + key_row * D + kk[:, None] * (G * D) + dd[None, :]
    v_tile = DV + key_row * E + kk[:, None] * (G * E) + ee[None, :]
    dk = tl.load(k_tile)
    dv = tl.load(v_tile)
    copy_step = tl.full([], BLOCK, tl.int64)
    for item in range(begin, end):
        copy = copy_step * item
        dk += tl.load(PART_DK + (copy + kk)[:, None] * D + dd[None, :])
        dv += tl.load(PART_DV + (copy + kk)[:, None] * E + ee[None, :])
    tl.store(k_tile, dk)
    tl.store(v_tile, dv)
