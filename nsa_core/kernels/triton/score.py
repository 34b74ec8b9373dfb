"""Importance of selection blocks: compressed probabilities summed by overlap and over the heads.

Selection block j covers the strides j*R .. j*R + R - 1 (R = l' / d) and compressed block i the
strides i .. i + r - 1 (r = l / d). Since l <= l', block i touches its own selection block i // R
and at most the next one, with min(r, R - i % R) and max(0, i % R + r - R) strides (arXiv
2502.11089, Eq. 9).
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.document_slots import locate
from nsa_core.kernels.triton.rows import COMPRESSED, INFINITY, LOG2E, is_free, matmul, num_visible


@triton.jit
def _head_rows(Q, LSE, head_row, token, inside, head, H: tl.constexpr, D: tl.constexpr):
    """Q [tokens, D] of one head and log2 of its normaliser, +inf where nothing is visible."""
    row = token * H + head
    at = head_row * D + row[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(Q + at, mask=inside[:, None], other=0.0)
    lse = tl.load(LSE + head_row + row, mask=inside, other=-INFINITY)
    return q, tl.where(lse == -INFINITY, INFINITY, lse * LOG2E)


@triton.jit
def spread_over_blocks(
    prob, carry, TILE_BLOCKS: tl.constexpr, PER_BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """What the probabilities [rows, keys] of a tile give to its selection blocks [rows, blocks].

    `carry` [rows] is what the tile before left for the first block; returned is what this one
    leaves for the next.
    """
    lane = tl.arange(0, PER_BLOCK)
    own_weight = tl.minimum(OVERLAP, PER_BLOCK - lane).to(tl.float32)
    next_weight = tl.maximum(0, lane + OVERLAP - PER_BLOCK).to(tl.float32)
    jj = tl.arange(0, TILE_BLOCKS)
    strides = tl.reshape(prob, [prob.shape[0], TILE_BLOCKS, PER_BLOCK])
    own = tl.sum(strides * own_weight[None, None, :], 2)
    spill = tl.sum(strides * next_weight[None, None, :], 2)
    before = tl.broadcast_to(tl.maximum(jj - 1, 0)[None, :], [prob.shape[0], TILE_BLOCKS])
    own += tl.where((jj == 0)[None, :], carry[:, None], tl.gather(spill, before, 1))
    return own, tl.sum(tl.where((jj == TILE_BLOCKS - 1)[None, :], spill, 0.0), 1)


@triton.jit(do_not_specialize=["first_slot", "chunk_tokens", "num_blocks", "num_cells"])
def score_kernel(
    Q, K, LSE, SCORE, CELL_MAX, DOCUMENT, CU,
    first_slot, chunk_tokens, num_blocks, num_cells, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr, G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Scores [G, chunk_tokens, num_blocks] float32 of one query block; heads of a group summed.

    Query blocks that take every block there is (CHOSEN is enough) are left out. Blocks that are
    forced or lie ahead score -1. A key tile makes the scores of one cell of blocks; the highest of
    each goes to CELL_MAX [G, chunk_tokens, num_cells]. HOLD keeps the q tiles of all heads of the
    group at hand; without it they are read again for every key tile.
    """
    PER_BLOCK: tl.constexpr = BLOCK // STRIDE
    OVERLAP: tl.constexpr = SPAN // STRIDE
    TILE_BLOCKS: tl.constexpr = BN // PER_BLOCK
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, first_slot + slot, BLOCK)
    if (block * BLOCK >= length) | (block < CHOSEN):
        return
    token = tl.arange(0, BLOCK)
    position = block * BLOCK + token
    inside = position < length
    last = tl.minimum(block * BLOCK + BLOCK - 1, length - 1)
    head_row = (start + block * BLOCK).to(tl.int64) * (G * HG) + g * HG
    kk = tl.arange(0, BN)
    key_row = (start // STRIDE).to(tl.int64) * G + g
    k_base = K + key_row * D
    k_tile = kk[:, None] * (G * D) + tl.arange(0, D)[None, :]
    num_keys = num_visible(length - 1, COMPRESSED, SPAN, STRIDE)
    high = num_visible(position, COMPRESSED, SPAN, STRIDE)
    jj = tl.arange(0, TILE_BLOCKS)
    carry = tl.zeros([BLOCK], tl.float32)
    score_row = SCORE + (g.to(tl.int64) * chunk_tokens + slot * BLOCK) * num_blocks
    cell_row = CELL_MAX + (g.to(tl.int64) * chunk_tokens + slot * BLOCK) * num_cells
    held_q: tl.tuple = ()
    held_lse: tl.tuple = ()
    if HOLD:
        for h in tl.static_range(HG):
            q, lse = _head_rows(Q, LSE, head_row, token, inside, h, G * HG, D)
            held_q += (q,)
            held_lse += (lse,)
    end = tl.cdiv(num_visible(last, COMPRESSED, SPAN, STRIDE), BN)
    for j in tl.range(0, end, num_stages=STAGES):
        held = (j * BN + kk < num_keys)[:, None]
        k = tl.load(k_base + j * (BN * G * D) + k_tile, mask=held, other=0.0)
        prob = tl.zeros([BLOCK, BN], tl.float32)
        if HOLD:
            for h in tl.static_range(HG):
                prob += tl.exp2(matmul(held_q[h], tl.trans(k)) * qk_scale - held_lse[h][:, None])
        else:
            for h in tl.range(0, HG, num_stages=STAGES):
                q, lse = _head_rows(Q, LSE, head_row, token, inside, h, G * HG, D)
                prob += tl.exp2(matmul(q, tl.trans(k)) * qk_scale - lse[:, None])
        prob = tl.where((j * BN + kk)[None, :] < high[:, None], prob, 0.0)
        own, carry = spread_over_blocks(prob, carry, TILE_BLOCKS, PER_BLOCK, OVERLAP)
        column = j * TILE_BLOCKS + jj
        own = tl.where(is_free(column, block)[None, :], own, -1.0)
        target = score_row + token[:, None] * num_blocks + column[None, :]
        tl.store(target, own, mask=inside[:, None] & (column < num_blocks)[None, :])
        tl.store(cell_row + token * num_cells + j, tl.max(own, 1), mask=inside)
