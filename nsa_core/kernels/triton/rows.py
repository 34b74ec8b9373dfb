"""Device functions shared by the attention kernels: rows, visibility and the online softmax.

A row is one query head of one token. The h heads of a group share keys, so the rows of a tile are
(token, head) pairs laid end to end: row r is token r // h, head r % h. No group size is padded.
Scores live in base 2: `qk_scale` is log2(e) / sqrt(D).
"""

import triton
import triton.language as tl

COMPRESSED = tl.constexpr(0)  # keys are compressed blocks of SPAN tokens every STRIDE tokens
SLIDING = tl.constexpr(1)  # keys are the last SPAN tokens
CHOSEN = tl.constexpr(2)  # keys are the tokens of the blocks whose bit is set
INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-1e30)  # a running maximum that no finite score goes below
HUGE = tl.constexpr(3.38e38)  # bfloat16 and float32 hold it
UNREACHED = tl.constexpr(1e20)  # no sum of sound values is as large, nor HUGE with a weight > 3e-19
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


NO_ROW = tl.constexpr(0x7F800000)  # the packed terms of a row that does not exist: +inf and 0


@triton.jit
def pack_terms(offset, delta):
    """Both float32 terms of a row in one int64, so that one load brings them."""
    low = offset.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (delta.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def unpack_terms(terms):
    """(offset, delta) of packed terms."""
    offset = terms.to(tl.int32).to(tl.float32, bitcast=True)
    return offset, (terms >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def num_visible(position, MODE: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr):
    """Number of keys, counted from the first, that a token at `position` may see."""
    if MODE == COMPRESSED:
        return tl.maximum(position - SPAN + 1 + STRIDE, 0) // STRIDE
    return position + 1


@triton.jit
def is_free(block, current):
    """Whether a token in block `current` attends to an earlier block by choice only.

    The opposite of `geometry.is_forced` among the blocks that have started.
    """
    return (block > 0) & (block < current - 1)


@triton.jit
def matmul(a, b):
    """A @ b in float32; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def matmul_add(a, b, c):
    """A @ b + c in float32; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def softmax_step(scores, v, qk_scale, peak, total, out, chosen, HAS_CHOICE: tl.constexpr):
    """Fold one tile of scores [rows, keys] and values into the running softmax.

    `chosen` [rows] switches a whole row off (HAS_CHOICE) at the price of one select per row:
    an offset of +inf makes every exp2 zero.
    """
    raised = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
    if HAS_CHOICE:
        raised = tl.where(chosen, raised, peak)
        prob = tl.exp2(scores * qk_scale - tl.where(chosen, raised, INFINITY)[:, None])
    else:
        prob = tl.exp2(scores * qk_scale - raised[:, None])
    decay = tl.exp2(peak - raised)
    total = total * decay + tl.sum(prob, 1)
    out = matmul_add(prob.to(v.dtype), v, out * decay[:, None])
    return raised, total, out


@triton.jit
def hide_unseen(scores, v, seen):
    """Scores that are -inf where a row does not see a key, and values that cannot reach such a row.

    0 * NaN is NaN, and 0 times a huge number is 0. So a value that is not finite is taken for a
    huge one, and `restore_nan` turns what came of it into NaN: two elementwise steps, where a look
    for NaN would cost the loop a reduction. Half precision has no number that no sum of values
    reaches: there the scores of the rows that do see such a key are made NaN.
    """
    return hide_scores(scores, v, seen), tame_values(v)


@triton.jit
def hide_scores(scores, v, seen):
    """The scores of `hide_unseen`."""
    if v.dtype == tl.float16:
        is_broken = tl.max(tl.where(tl.abs(v.to(tl.float32)) < INFINITY, 0, 1), 1) > 0
        scores = tl.where(is_broken[None, :], float("nan"), scores)
    return tl.where(seen, scores, -INFINITY)


@triton.jit
def tame_values(v):
    """The values of `hide_unseen`."""
    is_finite = tl.abs(v.to(tl.float32)) < INFINITY
    if v.dtype == tl.float16:
        tamed = tl.where(is_finite, v, 0.0).to(v.dtype)
    else:
        tamed = tl.where(is_finite, v, tl.full(v.shape, HUGE, v.dtype))
    return tamed


@triton.jit
def restore_nan(out):
    """Sums of values, NaN where a value that was not finite is one of them; see `hide_unseen`."""
    return tl.where(tl.abs(out) > UNREACHED, float("nan"), out)


@triton.jit
def finish_softmax(peak, total):
    """Return (divisor of the sum, natural log of the normaliser); -inf where nothing was seen."""
    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    return divisor, tl.where(seen, (peak + tl.log2(divisor)) * LN2, -INFINITY)


@triton.jit
def query_gradient_step(q, grad, offset, delta, k, v, qk_scale, dq, visible, MASKED: tl.constexpr):
    """Add ds @ k of one key tile to dq; `offset` is +inf on rows that see nothing."""
    prob = tl.exp2(matmul(q, tl.trans(k)) * qk_scale - offset[:, None])
    if MASKED:
        prob = tl.where(visible, prob, 0.0)
    ds = prob * (matmul(grad, tl.trans(v)) - delta[:, None])
    return matmul_add(ds.to(k.dtype), k, dq)


@triton.jit
def key_gradient_step(
    q, grad, offset, delta, k, v, qk_scale, dk, dv, visible, MASKED: tl.constexpr
):
    """Add one tile of rows to dk and dv; returns ds [keys, rows] too, for a fused dq."""
    prob = tl.exp2(matmul(k, tl.trans(q)) * qk_scale - offset)
    if MASKED:
        prob = tl.where(visible, prob, 0.0)
    dv = matmul_add(prob.to(grad.dtype), grad, dv)
    ds = (prob * (matmul(v, tl.trans(grad)) - delta[None, :])).to(q.dtype)
    dk = matmul_add(ds, q, dk)
    return dk, dv, ds
