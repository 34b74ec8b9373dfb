"""dk and dv on Hopper in Gluon: one warp copies tiles, two warpgroups multiply them.

A program owns 128 keys of a group, 64 for each warpgroup, and walks over the tokens that see them,
64 tokens of one head at a time, the heads of a token tile one after the other. The copying warp
fills a ring of tiles (q, grad, offset, delta) by TMA; a warpgroup keeps dk and dv in registers. It
works on scores with keys as rows, S = K Q^T, so that P and dS are register operands of the next
product and never pass through shared memory.
With AHEAD, S of the next tile and dP of this one are made while this tile's exponentials are; wide
heads have no registers for that.

What a row sees is as in `attend.py`: a warpgroup's tiles fall into five runs: not seen, cut, whole,
cut, not seen. TERMS [2 H, padded] holds the planes of offset and delta, where each document begins
at a multiple of 64 (TMA needs multiples of 16 bytes), with offset +inf and delta 0 behind its end;
BITS [G words, padded] has the same columns.
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

from nsa_core.kernels.triton.hopper.ring import advance, clear_rows, product_layout
from nsa_core.kernels.triton.rows import CHOSEN, COMPRESSED, INFINITY, SLIDING


@gluon.jit
def key_limits(
    key0, num_keys, length, KEYS: gl.constexpr,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Tokens of a document: first to see a key of a tile, first to see all; first to lose, end."""
    if MODE == COMPRESSED:
        first_seen = key0 * STRIDE + SPAN - 1
        all_seen = (gl.minimum(key0 + KEYS, num_keys) - 1) * STRIDE + SPAN - 1
    else:
        first_seen = key0
        all_seen = key0 + KEYS - 1
    if MODE == SLIDING:
        first_lost = gl.minimum(key0 + SPAN, length)
        all_lost = gl.minimum(key0 + KEYS - 1 + SPAN, length)
    else:
        first_lost = length
        all_lost = length
    return first_seen, all_seen, first_lost, all_lost


@gluon.jit
def copy_tiles(
    q_desc, grad_desc, terms_desc, bits_desc, k_desc, v_desc,
    q_ring, grad_ring, offset_ring, delta_ring, bits_ring, k_tiles, v_tiles,
    filled, emptied, keys_filled, start, padded, key_row, g, begin, end, word_row,
    MODE: gl.constexpr, G: gl.constexpr, HG: gl.constexpr, D: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring both key tiles, then every head of the token tiles [begin, end)."""
    mbarrier.expect(keys_filled, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for half in gl.static_range(2):
        key = key_row + 64 * half
        tma.async_copy_global_to_shared(k_desc, [key, g * D], keys_filled, k_tiles.index(half))
        tma.async_copy_global_to_shared(v_desc, [key, g * D], keys_filled, v_tiles.index(half))
    BITS_BYTES: gl.constexpr = bits_desc.block_type.nbytes if MODE == CHOSEN else 0
    BYTES: gl.constexpr = (
        q_desc.block_type.nbytes + grad_desc.block_type.nbytes + 2 * terms_desc.block_type.nbytes
    )
    slot = 0
    phase = 0
    for at in range(begin, end):
        for h in range(HG):
            head = g * HG + h
            mbarrier.wait(emptied.index(slot), phase ^ 1)
            bar = filled.index(slot)
            mbarrier.expect(bar, BYTES + BITS_BYTES)
            row = start + at * BM
            tma.async_copy_global_to_shared(q_desc, [row, head * D], bar, q_ring.index(slot))
            tma.async_copy_global_to_shared(grad_desc, [row, head * D], bar, grad_ring.index(slot))
            column = padded + at * BM
            tma.async_copy_global_to_shared(
                terms_desc, [head, column], bar, offset_ring.index(slot)
            )
            tma.async_copy_global_to_shared(
                terms_desc, [G * HG + head, column], bar, delta_ring.index(slot)
            )
            if MODE == CHOSEN:
                tma.async_copy_global_to_shared(
                    bits_desc, [word_row, column], bar, bits_ring.index(slot)
                )
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def add_tile(
    s, dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled, emptied,
    slot, phase, has_next, at, length, key, bit, qk_scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, D: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, AHEAD: gl.constexpr,
    CLEAR: gl.constexpr,
):  # fmt: skip
    """Add 64 tokens of one head to dk, dv; with AHEAD, S comes in and the next tile's goes out."""
    s_layout: gl.constexpr = product_layout(BM)
    sum_layout: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.full([64, BM], 0.0, gl.float32, s_layout)
    q = q_ring.index(slot)
    grad = grad_ring.index(slot)
    next_slot, next_phase = advance(slot, phase, STAGES)
    next_s = s
    if AHEAD:
        dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(filled.index(next_slot), next_phase, pred=has_next)
        next_q = q_ring.index(next_slot).permute((1, 0))
        next_s = warpgroup_mma(k, next_q, zero, use_acc=False, is_async=True)
    else:
        mbarrier.wait(filled.index(slot), phase)
        if CLEAR:
            clear_rows(q, length - at, D, BM)
            clear_rows(grad, length - at, D, BM)
            fence_async_shared()
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
    offset = offset_ring.index(slot).reshape([BM]).load(columns)
    if MODE == CHOSEN:
        word = bits_ring.index(slot).reshape([BM]).load(columns)
        offset = gl.where(((word >> bit) & 1) != 0, offset, INFINITY)
    p = gl.exp2(s * qk_scale - offset[None, :])
    if MASKED:
        column = gl.arange(0, BM, layout=columns)[None, :]
        if MODE == COMPRESSED:
            seen = column >= (key * STRIDE + (SPAN - 1) - at)[:, None]
        else:
            seen = column >= (key - at)[:, None]
        if MODE == SLIDING:
            seen = seen & (column < (key + SPAN - at)[:, None])
        p = gl.where(seen, p, 0.0)
    p_operand = gl.convert_layout(p.to(q.dtype), operand)
    dp = warpgroup_mma_wait(1 if AHEAD else 0, deps=(dp,))
    dv = warpgroup_mma(p_operand, grad, dv, is_async=True)
    delta = delta_ring.index(slot).reshape([BM]).load(columns)
    ds = p * (dp - delta[None, :])
    ds_operand = gl.convert_layout(ds.to(q.dtype), operand)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    if AHEAD:
        s, dv, dk = warpgroup_mma_wait(0, deps=(next_s, dv, dk))
    else:
        dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(emptied.index(slot), count=1)
    return s, dk, dv, next_slot, next_phase


@gluon.jit
def add_tiles(
    dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled, emptied,
    slot, phase, first, count, length, key, bit, qk_scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, HG: gl.constexpr,
    D: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    AHEAD: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """Every head of `count` token tiles, two heads a round where they are even: no moves."""
    PAIRS: gl.constexpr = HG % 2 == 0
    STEP: gl.constexpr = 2 if PAIRS else 1
    s_layout: gl.constexpr = product_layout(BM)
    s = gl.full([64, BM], 0.0, gl.float32, s_layout)
    if AHEAD:
        mbarrier.wait(filled.index(slot), phase, pred=count > 0)
        s = warpgroup_mma(k, q_ring.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
    total = HG * count
    for i in range(0, total, STEP):
        at = (first + i // HG) * BM
        if PAIRS:
            s, dk, dv, slot, phase = add_tile(
                s, dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled,
                emptied, slot, phase, True, at, length, key, bit, qk_scale,
                MODE, SPAN, STRIDE, D, BM, STAGES, MASKED, AHEAD, CLEAR,
            )  # fmt: skip
        s, dk, dv, slot, phase = add_tile(
            s, dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled,
            emptied, slot, phase, i + STEP < total, at, length, key, bit, qk_scale,
            MODE, SPAN, STRIDE, D, BM, STAGES, MASKED, AHEAD, CLEAR,
        )  # fmt: skip
    return dk, dv, slot, phase


@gluon.jit
def skip_tiles(filled, emptied, slot, phase, count, STAGES: gl.constexpr):
    """Give back tiles that only the other warpgroup needs."""
    for _ in range(count):
        mbarrier.wait(filled.index(slot), phase)
        mbarrier.arrive(emptied.index(slot), count=1)
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def sum_half(
    half: gl.constexpr, DK, DV, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, k_tiles,
    v_tiles, filled, emptied, keys_filled, key0, num_keys, key_row, copy_row, g, begin, end, high,
    length, qk_scale, scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, G: gl.constexpr,
    HG: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    IN_REGISTERS: gl.constexpr, AHEAD: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """dk, dv of 64 keys: what one warpgroup does."""
    s_layout: gl.constexpr = product_layout(BM)
    sum_layout: gl.constexpr = product_layout(D)
    mbarrier.wait(keys_filled, 0)
    if IN_REGISTERS:
        k = k_tiles.index(half).load(gl.DotOperandLayout(0, s_layout, 2))
        v = v_tiles.index(half).load(gl.DotOperandLayout(0, s_layout, 2))
    else:
        k = k_tiles.index(half)
        v = v_tiles.index(half)
    dk = gl.full([64, D], 0.0, gl.float32, sum_layout)
    dv = gl.full([64, D], 0.0, gl.float32, sum_layout)
    own0 = key0 + half * 64
    bit = (own0 // 64) % 32
    key = own0 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    first_seen, all_seen, first_lost, all_lost = key_limits(
        own0, num_keys, length, 64, MODE, SPAN, STRIDE
    )
    seen_from = gl.minimum(gl.maximum(first_seen // BM, begin), end)
    seen_from = gl.where(own0 < num_keys, seen_from, end)
    seen_to = gl.maximum(gl.minimum(gl.cdiv(all_lost, BM), end), seen_from)
    full_to = gl.maximum(gl.minimum(seen_to, length // BM), seen_from)
    whole_from = gl.minimum(gl.maximum(gl.cdiv(all_seen, BM), seen_from), full_to)
    whole_to = gl.minimum(gl.maximum(gl.minimum(first_lost, high) // BM, whole_from), full_to)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot, phase = skip_tiles(filled, emptied, slot, phase, HG * (seen_from - begin), STAGES)
    for part in range(2):
        dk, dv, slot, phase = add_tiles(
            dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled, emptied,
            slot, phase, gl.where(part == 0, seen_from, whole_to),
            gl.where(part == 0, whole_from - seen_from, full_to - whole_to), length, key, bit,
            qk_scale, MODE, SPAN, STRIDE, HG, D, BM, STAGES, True, AHEAD, False,
        )  # fmt: skip
        dk, dv, slot, phase = add_tiles(
            dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled, emptied,
            slot, phase, whole_from, gl.where(part == 0, whole_to - whole_from, 0), length, key,
            bit, qk_scale, MODE, SPAN, STRIDE, HG, D, BM, STAGES, False, AHEAD, False,
        )  # fmt: skip
    dk, dv, slot, phase = add_tiles(
        dk, dv, k, v, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, filled, emptied,
        slot, phase, full_to, seen_to - full_to, length, key, bit, qk_scale,
        MODE, SPAN, STRIDE, HG, D, BM, STAGES, True, False, True,
    )  # fmt: skip
    slot, phase = skip_tiles(filled, emptied, slot, phase, HG * (end - seen_to), STAGES)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, sum_layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, sum_layout))
    held = (own0 + row < num_keys)[:, None]
    base = ((copy_row + key_row + half * 64).to(gl.int64) * G + g) * D
    out = base + (row[:, None] * (G * D) + column[None, :])
    dk = dk * scale
    if ATOMIC:
        gl.atomic_add(DK + out, dk, mask=held, sem="relaxed")
        gl.atomic_add(DV + out, dv, mask=held, sem="relaxed")
    else:
        gl.store(DK + out, dk.to(DK.dtype.element_ty), mask=held)
        gl.store(DV + out, dv.to(DV.dtype.element_ty), mask=held)


@gluon.jit(do_not_specialize=["num_words", "segment", "copy_keys"])
def hopper_key_gradient_kernel(
    q_desc, grad_desc, terms_desc, bits_desc, k_desc, v_desc, DK, DV, DOCUMENT, CU,
    num_words, segment, copy_keys, qk_scale, scale,
    MODE: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, G: gl.constexpr,
    HG: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    IN_REGISTERS: gl.constexpr, AHEAD: gl.constexpr, ATOMIC: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv of 128 keys of one group over the tokens of one segment (axis 2).

    DOCUMENT names the documents of tiles of 128 compressed keys, or of query blocks: programs of
    every second query block of a document return, the others take the next one's keys along.
    Compressed keys are few and their rows many: segments add up by float32 atomics (ATOMIC), or
    each writes its own copy, `copy_keys` keys apart (0 for ATOMIC). The other modes see a key once
    and store.
    """
    KEYS: gl.constexpr = 128 if MODE == COMPRESSED else 64
    document = gl.load(DOCUMENT + gl.program_id(0))
    start = gl.load(CU + document)
    length = gl.load(CU + document + 1) - start
    key0 = (gl.program_id(0) - start // (KEYS * STRIDE) - document) * KEYS
    if MODE == COMPRESSED:  # noqa: SIM108 - this is one branch, and the other would be both
        num_keys = gl.maximum(length - SPAN + STRIDE, 0) // STRIDE
    else:
        num_keys = length
    first_seen, _, _, all_lost = key_limits(key0, num_keys, length, 128, MODE, SPAN, STRIDE)
    low = gl.maximum(gl.program_id(2) * segment, first_seen)
    high = gl.minimum((gl.program_id(2) + 1) * segment, all_lost)
    g = gl.program_id(1)
    if (key0 < num_keys) & (low < high) & (key0 % 128 == 0):
        begin = low // BM
        end = gl.cdiv(high, BM)
        padded = (start // 64 + document) * 64
        key_row = start // STRIDE + key0
        copy_row = gl.program_id(2).to(gl.int64) * copy_keys
        q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BM, D], q_desc.layout)
        grad_ring = gl.allocate_shared_memory(grad_desc.dtype, [STAGES, BM, D], grad_desc.layout)
        offset_ring = gl.allocate_shared_memory(
            terms_desc.dtype, [STAGES, 1, BM], terms_desc.layout
        )
        delta_ring = gl.allocate_shared_memory(terms_desc.dtype, [STAGES, 1, BM], terms_desc.layout)
        if MODE == CHOSEN:
            bits_ring = gl.allocate_shared_memory(
                bits_desc.dtype, [STAGES, 1, BM], bits_desc.layout
            )
        else:
            bits_ring = delta_ring
        k_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, 64, D], k_desc.layout)
        v_tiles = gl.allocate_shared_memory(v_desc.dtype, [2, 64, D], v_desc.layout)
        filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        keys_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(filled.index(i), count=1)
            mbarrier.init(emptied.index(i), count=2)
        mbarrier.init(keys_filled, count=1)
        # A tuple of constants that has a name would hold tensors: each is written out.
        gl.warp_specialize([
            (sum_half, (
                0, DK, DV, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, k_tiles, v_tiles,
                filled, emptied, keys_filled, key0, num_keys, key_row, copy_row, g, begin, end,
                high, length, qk_scale, scale, MODE, SPAN, STRIDE, G, HG, D, BM, STAGES,
                IN_REGISTERS, AHEAD, ATOMIC,
            )),
            (sum_half, (
                1, DK, DV, q_ring, grad_ring, offset_ring, delta_ring, bits_ring, k_tiles, v_tiles,
                filled, emptied, keys_filled, key0, num_keys, key_row, copy_row, g, begin, end,
                high, length, qk_scale, scale, MODE, SPAN, STRIDE, G, HG, D, BM, STAGES,
                IN_REGISTERS, AHEAD, ATOMIC,
            )),
            (copy_tiles, (
                q_desc, grad_desc, terms_desc, bits_desc, k_desc, v_desc, q_ring, grad_ring,
                offset_ring, delta_ring, bits_ring, k_tiles, v_tiles, filled, emptied, keys_filled,
                start, padded, key_row, g, begin, end, g * num_words + key0 // 64 // 32,
                MODE, G, HG, D, BM, STAGES,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
