"""The bands of the KV-major path, and the kernels that bring items and bands together.

Bands are the blocks that select forces: a query's own block, the one before it, block 0. All rows
of a query block share them, so they are small dense products here; `flags` (index.py) switches a
band off for a row whose ids lack it, so that any ids give the right sum. No atomics in this
module.
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.document_slots import locate
from nsa_core.kernels.triton.index import CURRENT, FIRST, PREVIOUS
from nsa_core.kernels.triton.items import chunk_start, partial_row
from nsa_core.kernels.triton.rows import (
    INFINITY,
    LOWEST,
    finish_softmax,
    hide_unseen,
    is_free,
    key_gradient_step,
    matmul,
    query_gradient_step,
    restore_nan,
    softmax_step,
)


@triton.jit
def load_block(
    K, V, key_row, keys, g, BLOCK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    """K [BLOCK, D] and v [BLOCK, E] of a block that holds `keys` keys; the rest is zero."""
    kk = tl.arange(0, BLOCK)
    held = (kk < keys)[:, None]
    row = key_row.to(tl.int64) * G + g
    k = tl.load(
        K + row * D + kk[:, None] * (G * D) + tl.arange(0, D)[None, :], mask=held, other=0.0
    )
    v = tl.load(
        V + row * E + kk[:, None] * (G * E) + tl.arange(0, E)[None, :], mask=held, other=0.0
    )
    return k, v


@triton.jit(do_not_specialize=["first_slot", "num_tokens"])
def merge_forward_kernel(
    Q, K, V, IDS, FLAGS, PART_OUT, PART_LSE, OUT, LSE, DOCUMENT, CU,
    first_slot, num_tokens, qk_scale,
    BLOCK: tl.constexpr, G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CHOSEN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out and natural lse of one row tile of a chunk: up to three bands and the partial outputs."""
    TILES: tl.constexpr = BLOCK * HG // BM
    g = tl.program_id(1)
    slot = first_slot + tl.program_id(0) // TILES
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    row = (tl.program_id(0) % TILES) * BM + tl.arange(0, BM)
    within = row // HG
    position = block * BLOCK + within
    if block * BLOCK + (tl.program_id(0) % TILES) * BM // HG >= length:
        return
    inside = position < length
    head_row = (start + block * BLOCK).to(tl.int64) * (G * HG) + g * HG
    local = within * (G * HG) + row % HG
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    q = tl.load(
        Q + head_row * D + local[:, None] * D + dd[None, :], mask=inside[:, None], other=0.0
    )
    flags = tl.load(FLAGS + g.to(tl.int64) * num_tokens + start + position, mask=inside, other=0)
    peak = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, E], tl.float32)
    k, v = load_block(K, V, start + block * BLOCK, length - block * BLOCK, g, BLOCK, G, D, E)
    seen = (tl.arange(0, BLOCK)[None, :] <= within[:, None]) & ((flags & CURRENT) != 0)[:, None]
    scores, v = hide_unseen(matmul(q, tl.trans(k)), v, seen)
    peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, inside, False)
    if block > 0:
        k, v = load_block(K, V, start + (block - 1) * BLOCK, BLOCK, g, BLOCK, G, D, E)
        chosen = (flags & PREVIOUS) != 0
        scores = matmul(q, tl.trans(k))
        peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, chosen, True)
    if block > 1:
        k, v = load_block(K, V, start, BLOCK, g, BLOCK, G, D, E)
        chosen = (flags & FIRST) != 0
        scores = matmul(q, tl.trans(k))
        peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, chosen, True)
    if block > 2:
        token0 = chunk_start(DOCUMENT, CU, first_slot, BLOCK)
        id_row = ((start + position) * G + g) * CHOSEN
        for n in tl.range(CHOSEN, num_stages=STAGES):
            chosen_block = tl.load(IDS + id_row + n, mask=inside, other=-1)
            listed = is_free(chosen_block, block)
            at = partial_row(start + position - token0, n, row % HG, g, G, HG, CHOSEN)
            part_lse = tl.load(PART_LSE + at, mask=listed, other=LOWEST)
            source = PART_OUT + at[:, None] * E + ee[None, :]
            part = tl.load(source, mask=listed[:, None], other=0.0).to(tl.float32)
            raised = tl.maximum(peak, part_lse)
            decay = tl.exp2(peak - raised)
            weight = tl.where(listed, tl.exp2(part_lse - raised), 0.0)
            total = total * decay + weight
            out = out * decay[:, None] + part * weight[:, None]
            peak = raised
    divisor, lse = finish_softmax(peak, total)
    out = restore_nan(out / divisor[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + head_row * E + local[:, None] * E + ee[None, :], out, mask=inside[:, None])
    tl.store(LSE + head_row + local, lse, mask=inside)


@triton.jit(do_not_specialize=["first_slot", "num_tokens"])
def merge_query_gradient_kernel(
    Q, K, V, GRAD, ROW_OFFSET, DELTA, IDS, FLAGS, PART_DQ, DQ, DOCUMENT, CU,
    first_slot, num_tokens, qk_scale, scale,
    BLOCK: tl.constexpr, G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CHOSEN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    ATOMIC_DQ: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Gradient of one row tile of q: bands, plus what the items left (sums, or partials)."""
    TILES: tl.constexpr = BLOCK * HG // BM
    g = tl.program_id(1)
    slot = first_slot + tl.program_id(0) // TILES
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    row = (tl.program_id(0) % TILES) * BM + tl.arange(0, BM)
    within = row // HG
    position = block * BLOCK + within
    if block * BLOCK + (tl.program_id(0) % TILES) * BM // HG >= length:
        return
    inside = position < length
    head_row = (start + block * BLOCK).to(tl.int64) * (G * HG) + g * HG
    local = within * (G * HG) + row % HG
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    q = tl.load(
        Q + head_row * D + local[:, None] * D + dd[None, :], mask=inside[:, None], other=0.0
    )
    grad_row = GRAD + head_row * E + local[:, None] * E + ee[None, :]
    grad = tl.load(grad_row, mask=inside[:, None], other=0.0)
    offset = tl.load(ROW_OFFSET + head_row + local, mask=inside, other=INFINITY)
    delta = tl.load(DELTA + head_row + local, mask=inside, other=0.0)
    flags = tl.load(FLAGS + g.to(tl.int64) * num_tokens + start + position, mask=inside, other=0)
    dq = tl.zeros([BM, D], tl.float32)
    k, v = load_block(K, V, start + block * BLOCK, length - block * BLOCK, g, BLOCK, G, D, E)
    seen = (tl.arange(0, BLOCK)[None, :] <= within[:, None]) & ((flags & CURRENT) != 0)[:, None]
    dq = query_gradient_step(q, grad, offset, delta, k, v, qk_scale, dq, seen, True)
    if block > 0:
        k, v = load_block(K, V, start + (block - 1) * BLOCK, BLOCK, g, BLOCK, G, D, E)
        cut = tl.where((flags & PREVIOUS) != 0, offset, INFINITY)
        dq = query_gradient_step(q, grad, cut, delta, k, v, qk_scale, dq, inside, False)
    if block > 1:
        k, v = load_block(K, V, start, BLOCK, g, BLOCK, G, D, E)
        cut = tl.where((flags & FIRST) != 0, offset, INFINITY)
        dq = query_gradient_step(q, grad, cut, delta, k, v, qk_scale, dq, inside, False)
    dq = dq * scale
    target = head_row * D + local[:, None] * D + dd[None, :]
    if ATOMIC_DQ:
        dq += tl.load(PART_DQ + target, mask=inside[:, None], other=0.0)
    else:
        if block > 2:
            token0 = chunk_start(DOCUMENT, CU, first_slot, BLOCK)
            id_row = ((start + position) * G + g) * CHOSEN
            for n in tl.range(CHOSEN, num_stages=STAGES):
                chosen_block = tl.load(IDS + id_row + n, mask=inside, other=-1)
                listed = is_free(chosen_block, block)
                at = partial_row(start + position - token0, n, row % HG, g, G, HG, CHOSEN)
                source = PART_DQ + at[:, None] * D + dd[None, :]
                dq += tl.load(source, mask=listed[:, None], other=0.0).to(tl.float32)
    if ADD:
        dq += tl.load(DQ + target, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(DQ + target, dq.to(DQ.dtype.element_ty), mask=inside[:, None])


@triton.jit
def band_rows(
    dk, dv, k, v, Q, GRAD, ROW_OFFSET, DELTA, flag_row, start, token, row0, stop, key0, g, qk_scale,
    FLAG: tl.constexpr, G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add BM rows, from row0 of the tokens at `token`, to dk, dv of the block at key0."""
    row = row0 + tl.arange(0, BM)
    position = token + row // HG
    inside = position < stop
    head_row = (start + token).to(tl.int64) * (G * HG) + g * HG
    local = (row // HG) * (G * HG) + row % HG
    q_row = Q + head_row * D + local[:, None] * D + tl.arange(0, D)[None, :]
    grad_row = GRAD + head_row * E + local[:, None] * E + tl.arange(0, E)[None, :]
    q = tl.load(q_row, mask=inside[:, None], other=0.0)
    grad = tl.load(grad_row, mask=inside[:, None], other=0.0)
    offset = tl.load(ROW_OFFSET + head_row + local, mask=inside, other=INFINITY)
    delta = tl.load(DELTA + head_row + local, mask=inside, other=0.0)
    flags = tl.load(flag_row + position, mask=inside, other=0)
    cut = tl.where((flags & FLAG) != 0, offset, INFINITY)
    seen = (key0 + tl.arange(0, BLOCK))[:, None] <= position[None, :]
    dk, dv, _ = key_gradient_step(
        q, grad, cut[None, :], delta, k, v, qk_scale, dk, dv, seen, CAUSAL
    )
    return dk, dv


@triton.jit(do_not_specialize=["num_tokens"])
def first_block_gradient_kernel(
    Q, K, V, GRAD, ROW_OFFSET, DELTA, FLAGS, DK, DV, DOCUMENT, CU, num_tokens, qk_scale,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, G: tl.constexpr, HG: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, ATOMIC_DKV: tl.constexpr,
):  # fmt: skip
    """Gradients of block 0 from the queries of one segment beyond block 1.

    Added to DK, DV [N, G, ...] in float32 (ATOMIC_DKV), or one copy per segment.
    """
    g = tl.program_id(1)
    start, length, segment = locate(DOCUMENT, CU, tl.program_id(0), SEGMENT)
    token = tl.maximum(segment * SEGMENT, 2 * BLOCK)
    stop = tl.minimum((segment + 1) * SEGMENT, length)
    if token >= stop:
        return
    k, v = load_block(K, V, start, BLOCK, g, BLOCK, G, D, E)
    flag_row = FLAGS + g.to(tl.int64) * num_tokens + start
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, E], tl.float32)
    for row0 in tl.range(0, (stop - token) * HG, BM, num_stages=1):
        dk, dv = band_rows(
            dk, dv, k, v, Q, GRAD, ROW_OFFSET, DELTA, flag_row, start, token, row0, stop, 0, g,
            qk_scale, FIRST, G, HG, D, E, BM, BLOCK, False,
        )  # fmt: skip
    if ATOMIC_DKV:
        row = (start + tl.arange(0, BLOCK)).to(tl.int64) * G + g
        tl.atomic_add(DK + row[:, None] * D + tl.arange(0, D)[None, :], dk, sem="relaxed")
        tl.atomic_add(DV + row[:, None] * E + tl.arange(0, E)[None, :], dv, sem="relaxed")
    else:
        copy = (tl.program_id(0).to(tl.int64) * G + g) * BLOCK + tl.arange(0, BLOCK)
        tl.store(DK + copy[:, None] * D + tl.arange(0, D)[None, :], dk)
        tl.store(DV + copy[:, None] * E + tl.arange(0, E)[None, :], dv)


@triton.jit(do_not_specialize=["num_tokens"])
def band_key_gradient_kernel(
    Q, K, V, GRAD, ROW_OFFSET, DELTA, FLAGS, ITEM_DK, ITEM_DV, FIRST_DK, FIRST_DV, DK, DV,
    DOCUMENT, CU, num_tokens, qk_scale, scale,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, G: tl.constexpr, HG: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, ATOMIC_DKV: tl.constexpr,
):  # fmt: skip
    """Final dk, dv of one block: queries of its own and the next block, items, block 0's copies."""
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, tl.program_id(0), BLOCK)
    key0 = block * BLOCK
    if key0 >= length:
        return
    kk = tl.arange(0, BLOCK)
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    held = (key0 + kk < length)[:, None]
    key_row = (start + key0).to(tl.int64) * G + g
    k_tile = key_row * D + kk[:, None] * (G * D) + dd[None, :]
    v_tile = key_row * E + kk[:, None] * (G * E) + ee[None, :]
    k, v = load_block(K, V, start + key0, length - key0, g, BLOCK, G, D, E)
    dk = tl.load(ITEM_DK + k_tile, mask=held, other=0.0)
    dv = tl.load(ITEM_DV + v_tile, mask=held, other=0.0)
    flag_row = FLAGS + g.to(tl.int64) * num_tokens + start
    stop = tl.minimum(key0 + BLOCK, length)
    for row0 in tl.range(0, (stop - key0) * HG, BM, num_stages=1):
        dk, dv = band_rows(
            dk, dv, k, v, Q, GRAD, ROW_OFFSET, DELTA, flag_row, start, key0, row0, stop, key0, g,
            qk_scale, CURRENT, G, HG, D, E, BM, BLOCK, True,
        )  # fmt: skip
    after = tl.minimum(key0 + 2 * BLOCK, length)
    for row0 in tl.range(0, (after - stop) * HG, BM, num_stages=1):
        dk, dv = band_rows(
            dk, dv, k, v, Q, GRAD, ROW_OFFSET, DELTA, flag_row, start, stop, row0, after, key0, g,
            qk_scale, PREVIOUS, G, HG, D, E, BM, BLOCK, False,
        )  # fmt: skip
    if not ATOMIC_DKV:
        num_copies = tl.where((block == 0) & (length > 2 * BLOCK), tl.cdiv(length, SEGMENT), 0)
        copy0 = (tl.program_id(0) - start // BLOCK + start // SEGMENT).to(tl.int64)
        for segment in range(num_copies):
            copy = ((copy0 + segment) * G + g) * BLOCK + kk
            dk += tl.load(FIRST_DK + copy[:, None] * D + dd[None, :])
            dv += tl.load(FIRST_DV + copy[:, None] * E + ee[None, :])
    dk = (dk * scale).to(DK.dtype.element_ty)
    tl.store(DK + k_tile, dk, mask=held)
    tl.store(DV + v_tile, dv.to(DV.dtype.element_ty), mask=held)
