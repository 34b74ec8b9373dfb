"""Kernels for the three ways a row attends: compressed blocks, window, chosen blocks.

All three see, at position t, keys [low(t), high(t)) of their own document; `CHOSEN` also needs the
bit of the key's block. So a row tile walks key tiles in three phases: those that every row sees
whole (no element mask), those that the lower limit cuts, and those that the causal limit cuts. The
pipelined loop over whole tiles comes first: behind a masked loop that writes the same sums, ptxas
makes every product of Hopper wait for the one before (its message C7515).
Layout: q, out [N, H, D|E]; k, v [keys, G, D|E]; lse, offset, delta [N, H]; bits
[G, words, padded] int32, where each document begins at a multiple of the query block.
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.document_slots import locate
from nsa_core.kernels.triton.rows import (
    CHOSEN,
    COMPRESSED,
    INFINITY,
    LOWEST,
    NO_ROW,
    SLIDING,
    finish_softmax,
    hide_unseen,
    key_gradient_step,
    matmul,
    num_visible,
    query_gradient_step,
    restore_nan,
    softmax_step,
    unpack_terms,
)


@triton.jit
def first_key(start, MODE: tl.constexpr, STRIDE: tl.constexpr):
    """Row of the document's first key: its first token, or its first compressed slot."""
    if MODE == COMPRESSED:
        return (start // STRIDE).to(tl.int64)
    return start.to(tl.int64)


@triton.jit
def row_limits(
    first, last, MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, BN: tl.constexpr
):
    """Key tiles: [begin, low_end) cut below, [low_end, full_end) whole, [full_end, end) causal."""
    full_end = num_visible(first, MODE, SPAN, STRIDE) // BN
    end = tl.cdiv(num_visible(last, MODE, SPAN, STRIDE), BN)
    begin = 0
    low_end = 0
    if MODE == SLIDING:
        begin = tl.maximum(first - SPAN + 1, 0) // BN
        low_end = tl.minimum(tl.cdiv(tl.maximum(last - SPAN + 1, 0), BN), full_end)
        low_end = tl.maximum(low_end, begin)
        full_end = tl.maximum(full_end, low_end)
    return begin, low_end, full_end, end


@triton.jit
def visible_keys(key, position, MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr):
    """Element mask; `key` and `position` broadcast against each other."""
    seen = key < num_visible(position, MODE, SPAN, STRIDE)
    if MODE == SLIDING:
        seen = seen & (key > position - SPAN)
    return seen


@triton.jit(do_not_specialize=["num_padded", "num_words"])
def attend_forward_kernel(
    Q, K, V, BITS, OUT, LSE, DOCUMENT, CU, num_padded, num_words, qk_scale,
    MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and log normaliser of one row tile of one group, longest rows first."""
    TILES: tl.constexpr = BLOCK * HG // BM
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, pid // TILES, BLOCK)
    row = (pid % TILES) * BM + tl.arange(0, BM)
    position = block * BLOCK + row // HG
    first = block * BLOCK + (pid % TILES) * BM // HG
    if first >= length:
        return
    last = tl.minimum(block * BLOCK + ((pid % TILES) * BM + BM - 1) // HG, length - 1)
    inside = position < length
    head_row = (start + block * BLOCK).to(tl.int64) * (G * HG) + g * HG
    local = (row // HG) * (G * HG) + row % HG
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    kk = tl.arange(0, BN)
    q = tl.load(
        Q + head_row * D + local[:, None] * D + dd[None, :], mask=inside[:, None], other=0.0
    )
    key0 = first_key(start, MODE, STRIDE)
    k_base = K + (key0 * G + g) * D
    v_base = V + (key0 * G + g) * E
    k_tile = kk[:, None] * (G * D) + dd[None, :]
    v_tile = kk[:, None] * (G * E) + ee[None, :]
    tile_step = BN * G
    num_keys = num_visible(length - 1, MODE, SPAN, STRIDE)
    peak = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, E], tl.float32)
    begin, low_end, full_end, end = row_limits(first, last, MODE, SPAN, STRIDE, BN)
    word_row = BITS
    if MODE == CHOSEN:
        word_row += num_padded.to(tl.int64) * (g * num_words) + pid // TILES * BLOCK + row // HG
        for w in range(tl.cdiv(full_end, 32)):
            word = tl.load(word_row + w * num_padded, mask=inside, other=0)
            for j in tl.range(w * 32, tl.minimum(full_end, w * 32 + 32), num_stages=STAGES):
                step = tile_step * j
                scores = matmul(q, tl.trans(tl.load(k_base + step * D + k_tile)))
                chosen = ((word >> (j - w * 32)) & 1) != 0
                v = tl.load(v_base + step * E + v_tile)
                peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, chosen, True)
    else:
        for j in tl.range(low_end, full_end, num_stages=STAGES):
            step = tile_step * j
            scores = matmul(q, tl.trans(tl.load(k_base + step * D + k_tile)))
            v = tl.load(v_base + step * E + v_tile)
            peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, inside, False)
    if MODE == SLIDING:
        for j in tl.range(begin, low_end, num_stages=1):
            step = tile_step * j
            scores = matmul(q, tl.trans(tl.load(k_base + step * D + k_tile)))
            scores = tl.where(
                (j * BN + kk)[None, :] > (position - SPAN)[:, None], scores, -INFINITY
            )
            v = tl.load(v_base + step * E + v_tile)
            peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, inside, False)
    for j in tl.range(full_end, end, num_stages=1):
        step = tile_step * j
        held = (j * BN + kk < num_keys)[:, None]
        k = tl.load(k_base + step * D + k_tile, mask=held, other=0.0)
        v = tl.load(v_base + step * E + v_tile, mask=held, other=0.0)
        seen = visible_keys((j * BN + kk)[None, :], position[:, None], MODE, SPAN, STRIDE)
        if MODE == CHOSEN:
            word = tl.load(word_row + (j // 32) * num_padded, mask=inside, other=0)
            seen = seen & (((word >> (j % 32)) & 1) != 0)[:, None]
        scores, v = hide_unseen(matmul(q, tl.trans(k)), v, seen)
        peak, total, out = softmax_step(scores, v, qk_scale, peak, total, out, inside, False)
    divisor, lse = finish_softmax(peak, total)
    out = restore_nan(out / divisor[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + head_row * E + local[:, None] * E + ee[None, :], out, mask=inside[:, None])
    tl.store(LSE + head_row + local, lse, mask=inside)


@triton.jit
def query_gradient_walk(
    dq, q, grad, K, V, OFFSET, DELTA, BITS, start, length, g, position, first, last, rows,
    padded, num_padded, num_words, qk_scale,
    MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what one row tile gets from the keys of one branch to dq.

    `rows` index [N, H], and `padded` the tokens of BITS.
    """
    inside = position < length
    kk = tl.arange(0, BN)
    offset = tl.load(OFFSET + rows, mask=inside, other=INFINITY)
    delta = tl.load(DELTA + rows, mask=inside, other=0.0)
    key0 = first_key(start, MODE, STRIDE)
    k_base = K + (key0 * G + g) * D
    v_base = V + (key0 * G + g) * E
    k_tile = kk[:, None] * (G * D) + tl.arange(0, D)[None, :]
    v_tile = kk[:, None] * (G * E) + tl.arange(0, E)[None, :]
    tile_step = BN * G
    num_keys = num_visible(length - 1, MODE, SPAN, STRIDE)
    begin, low_end, full_end, end = row_limits(first, last, MODE, SPAN, STRIDE, BN)
    if MODE == SLIDING:
        for j in tl.range(begin, low_end, num_stages=1):
            step = tile_step * j
            k = tl.load(k_base + step * D + k_tile)
            v = tl.load(v_base + step * E + v_tile)
            seen = (j * BN + kk)[None, :] > (position - SPAN)[:, None]
            dq = query_gradient_step(q, grad, offset, delta, k, v, qk_scale, dq, seen, True)
    word_row = BITS
    if MODE == CHOSEN:
        word_row += num_padded.to(tl.int64) * (g * num_words) + padded
        for w in range(tl.cdiv(full_end, 32)):
            word = tl.load(word_row + w * num_padded, mask=inside, other=0)
            for j in tl.range(w * 32, tl.minimum(full_end, w * 32 + 32), num_stages=STAGES):
                step = tile_step * j
                k = tl.load(k_base + step * D + k_tile)
                v = tl.load(v_base + step * E + v_tile)
                cut = tl.where(((word >> (j - w * 32)) & 1) != 0, offset, INFINITY)
                dq = query_gradient_step(q, grad, cut, delta, k, v, qk_scale, dq, inside, False)
    else:
        for j in tl.range(low_end, full_end, num_stages=STAGES):
            step = tile_step * j
            k = tl.load(k_base + step * D + k_tile)
            v = tl.load(v_base + step * E + v_tile)
            dq = query_gradient_step(q, grad, offset, delta, k, v, qk_scale, dq, inside, False)
    for j in tl.range(full_end, end, num_stages=1):
        step = tile_step * j
        held = (j * BN + kk < num_keys)[:, None]
        k = tl.load(k_base + step * D + k_tile, mask=held, other=0.0)
        v = tl.load(v_base + step * E + v_tile, mask=held, other=0.0)
        seen = visible_keys((j * BN + kk)[None, :], position[:, None], MODE, SPAN, STRIDE)
        if MODE == CHOSEN:
            word = tl.load(word_row + (j // 32) * num_padded, mask=inside, other=0)
            seen = seen & (((word >> (j % 32)) & 1) != 0)[:, None]
        dq = query_gradient_step(q, grad, offset, delta, k, v, qk_scale, dq, seen, True)
    return dq


@triton.jit(do_not_specialize=["num_padded", "num_words"])
def attend_query_gradient_kernel(
    Q, GRAD, K_CMP, V_CMP, OFFSET_CMP, DELTA_CMP, K_WIN, V_WIN, OFFSET_WIN, DELTA_WIN,
    K_SLC, V_SLC, OFFSET_SLC, DELTA_SLC, BITS, DQ, DOCUMENT, CU,
    num_padded, num_words, qk_scale, scale,
    HAS_CMP: tl.constexpr, HAS_WIN: tl.constexpr, HAS_SLC: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Dq of one row tile, summed over the branches that it HAS: q and grad are read once."""
    TILES: tl.constexpr = BLOCK * HG // BM
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, pid // TILES, BLOCK)
    row = (pid % TILES) * BM + tl.arange(0, BM)
    position = block * BLOCK + row // HG
    first = block * BLOCK + (pid % TILES) * BM // HG
    if first >= length:
        return
    last = tl.minimum(block * BLOCK + ((pid % TILES) * BM + BM - 1) // HG, length - 1)
    inside = position < length
    head_row = (start + block * BLOCK).to(tl.int64) * (G * HG) + g * HG
    local = (row // HG) * (G * HG) + row % HG
    dd = tl.arange(0, D)
    q_row = head_row * D + local[:, None] * D + dd[None, :]
    q = tl.load(Q + q_row, mask=inside[:, None], other=0.0)
    grad_row = GRAD + head_row * E + local[:, None] * E + tl.arange(0, E)[None, :]
    grad = tl.load(grad_row, mask=inside[:, None], other=0.0)
    dq = tl.zeros([BM, D], tl.float32)
    rows = head_row + local
    padded = pid // TILES * BLOCK + row // HG
    if HAS_CMP:
        dq = query_gradient_walk(
            dq, q, grad, K_CMP, V_CMP, OFFSET_CMP, DELTA_CMP, BITS, start, length, g, position,
            first, last, rows, padded, num_padded, num_words, qk_scale,
            COMPRESSED, SPAN, STRIDE, G, D, E, BN, STAGES,
        )  # fmt: skip
    if HAS_WIN:
        dq = query_gradient_walk(
            dq, q, grad, K_WIN, V_WIN, OFFSET_WIN, DELTA_WIN, BITS, start, length, g, position,
            first, last, rows, padded, num_padded, num_words, qk_scale,
            SLIDING, WINDOW, 1, G, D, E, BN, STAGES,
        )  # fmt: skip
    if HAS_SLC:
        dq = query_gradient_walk(
            dq, q, grad, K_SLC, V_SLC, OFFSET_SLC, DELTA_SLC, BITS, start, length, g, position,
            first, last, rows, padded, num_padded, num_words, qk_scale,
            CHOSEN, 0, 1, G, D, E, BLOCK, STAGES,
        )  # fmt: skip
    tl.store(DQ + q_row, (dq * scale).to(DQ.dtype.element_ty), mask=inside[:, None])


@triton.jit
def key_gradient_tile(
    dk, dv, k, v, q_base, grad_base, TERMS, terms_base, word_row, token0, stop, key0, head,
    num_padded, qk_scale,
    MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """BM tokens of one head, from token0 of a document, into dk, dv of the keys from key0."""
    row = tl.arange(0, BM)
    position = token0 + row
    inside = position < stop
    q_row = q_base + (token0 * H + head) * D + (row[:, None] * (H * D) + tl.arange(0, D)[None, :])
    grad_row = grad_base + (token0 * H + head) * E
    grad_row += row[:, None] * (H * E) + tl.arange(0, E)[None, :]
    terms_row = tl.multiple_of(terms_base + head * num_padded + token0, BM) + row
    if MASKED:
        q = tl.load(q_row, mask=inside[:, None], other=0.0)
        grad = tl.load(grad_row, mask=inside[:, None], other=0.0)
        terms = tl.load(TERMS + terms_row, mask=inside, other=NO_ROW)
    else:
        q = tl.load(q_row)
        grad = tl.load(grad_row)
        terms = tl.load(TERMS + terms_row)
    offset, delta = unpack_terms(terms)
    key = key0 + tl.arange(0, BN)
    cut = offset[None, :]
    if MODE == CHOSEN:
        word = tl.load(word_row + position, mask=inside, other=0) >> ((key0 // BLOCK) % 32)
        cut = tl.where((word & 1) != 0, offset, INFINITY)[None, :]
        if BN == 2 * BLOCK:
            upper = tl.where((word & 2) != 0, offset, INFINITY)[None, :]
            cut = tl.where((key < key0 + BLOCK)[:, None], cut, upper)
    seen = inside[None, :]
    if MASKED:
        seen = visible_keys(key[:, None], position[None, :], MODE, SPAN, STRIDE)
    dk, dv, _ = key_gradient_step(q, grad, cut, delta, k, v, qk_scale, dk, dv, seen, MASKED)
    return dk, dv


@triton.jit
def key_limits(
    key0, num_keys, length, MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Tokens of a document: first to see a key of a tile, first to see all; first to lose, end."""
    if MODE == COMPRESSED:
        first_seen = key0 * STRIDE + SPAN - 1
        all_seen = (tl.minimum(key0 + BN, num_keys) - 1) * STRIDE + SPAN - 1
    else:
        first_seen = key0
        all_seen = key0 + BN - 1
    first_lost = length
    all_lost = length
    if MODE == SLIDING:
        first_lost = tl.minimum(key0 + SPAN, length)
        all_lost = tl.minimum(key0 + BN - 1 + SPAN, length)
    return first_seen, all_seen, first_lost, all_lost


@triton.jit(do_not_specialize=["num_padded", "num_words", "segment", "segment_stride"])
def attend_key_gradient_kernel(
    Q, K, V, GRAD, TERMS, BITS, DK, DV, DOCUMENT, CU,
    num_padded, num_words, segment, segment_stride, qk_scale, scale,
    MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """dk, dv of one key tile of one group, over the rows of `segment` tokens (axis 2).

    A row tile is BM tokens of one head, so that rows lie evenly spaced in memory; TERMS are by
    head, [H, num_padded] as in row_terms.py. COMPRESSED has few keys and many rows: segments add
    up by fp32 atomics (ATOMIC), or each writes its own copy, `segment_stride` keys apart. The
    other modes see each key tile once and store.
    """
    TILE: tl.constexpr = BN * STRIDE if MODE == COMPRESSED else BLOCK
    g = tl.program_id(1)
    start, length, tile = locate(DOCUMENT, CU, tl.program_id(0), TILE)
    padded_start = (start // BLOCK + tl.load(DOCUMENT + tl.program_id(0))) * BLOCK
    num_keys = num_visible(length - 1, MODE, SPAN, STRIDE)
    key0 = tile * BN if MODE == COMPRESSED else tile * BLOCK
    first_seen, all_seen, first_lost, all_lost = key_limits(
        key0, num_keys, length, MODE, SPAN, STRIDE, BN
    )
    low = tl.maximum(tl.program_id(2) * segment, first_seen)
    high = tl.minimum((tl.program_id(2) + 1) * segment, all_lost)
    if (key0 >= num_keys) | (low >= high) | (key0 % BN != 0):
        return
    kk = tl.arange(0, BN)
    held = (key0 + kk < num_keys)[:, None]
    key_row = (first_key(start, MODE, STRIDE) + key0) * G + g
    k_tile = key_row * D + kk[:, None] * (G * D) + tl.arange(0, D)[None, :]
    v_tile = key_row * E + kk[:, None] * (G * E) + tl.arange(0, E)[None, :]
    k = tl.load(K + k_tile, mask=held, other=0.0)
    v = tl.load(V + v_tile, mask=held, other=0.0)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, E], tl.float32)
    word_row = BITS
    if MODE == CHOSEN:
        word = g.to(tl.int64) * num_words + key0 // BLOCK // 32
        word_row = BITS + word * num_padded + padded_start
    head_row = start.to(tl.int64) * (G * HG) + g * HG
    q_base = Q + head_row * D
    grad_base = GRAD + head_row * E
    terms_base = g * HG * num_padded.to(tl.int64) + padded_start
    begin = low // BM
    end = tl.cdiv(high, BM)
    whole_from = tl.minimum(tl.cdiv(tl.maximum(all_seen, low), BM), end)
    whole_to = tl.maximum(tl.minimum(first_lost, high) // BM, whole_from)
    num_before = whole_from - begin
    num_cut = num_before + end - whole_to
    head = 0
    at = whole_from
    for _ in tl.range(0, HG * (whole_to - whole_from), num_stages=STAGES):
        dk, dv = key_gradient_tile(
            dk, dv, k, v, q_base, grad_base, TERMS, terms_base, word_row, at * BM, high, key0,
            head, num_padded, qk_scale,
            MODE, SPAN, STRIDE, BLOCK, G * HG, D, E, BM, BN, False,
        )  # fmt: skip
        is_last = at == whole_to - 1
        at = tl.where(is_last, whole_from, at + 1)
        head = tl.where(is_last, head + 1, head)
    head = 0
    i = 0
    for _ in tl.range(0, HG * num_cut, num_stages=1):
        at = tl.where(i < num_before, begin + i, whole_to + i - num_before)
        dk, dv = key_gradient_tile(
            dk, dv, k, v, q_base, grad_base, TERMS, terms_base, word_row, at * BM, high, key0,
            head, num_padded, qk_scale,
            MODE, SPAN, STRIDE, BLOCK, G * HG, D, E, BM, BN, True,
        )  # fmt: skip
        is_last = i == num_cut - 1
        i = tl.where(is_last, 0, i + 1)
        head = tl.where(is_last, head + 1, head)
    dk = dk * scale
    if MODE == COMPRESSED:
        if ATOMIC:
            tl.atomic_add(DK + k_tile, dk, mask=held, sem="relaxed")
            tl.atomic_add(DV + v_tile, dv, mask=held, sem="relaxed")
        else:
            copy = tl.program_id(2).to(tl.int64) * segment_stride * G
            tl.store(DK + copy * D + k_tile, dk, mask=held)
            tl.store(DV + copy * E + v_tile, dv, mask=held)
    else:
        tl.store(DK + k_tile, dk.to(DK.dtype.element_ty), mask=held)
        tl.store(DV + v_tile, dv.to(DV.dtype.element_ty), mask=held)
