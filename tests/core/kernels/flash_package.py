"""A stand-in for flash-attn in PyTorch, written from the documentation of the package.

What its documentation promises and this keeps: packed rows with borders of queries and keys; the
causal mask and the window aligned to the bottom right corner; zero where a row sees nothing; query
head a reads key head a // (H / G); lse [H, total_q] of scaled scores where it is asked for. What
the real one does and is easy to forget: lse is +inf where a row sees nothing, and gradients of rows
of k and v beyond the last border are never written (here: NaN).
"""

from itertools import pairwise

import torch
from torch import Tensor


class _Poison(torch.autograd.Function):
    """Leave the gradient of rows beyond the last border unwritten."""

    @staticmethod
    def forward(ctx, x, num_used):
        ctx.num_used = num_used
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[ctx.num_used :] = float("nan")
        return grad, None


def visible(num_queries: int, num_keys: int, causal: bool, window_size) -> Tensor:
    """Bool [queries, keys], the corner at the bottom right."""
    query = torch.arange(num_queries)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys)
    left, right = window_size
    if causal:
        right = 0
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    return seen


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes, block_table) == (0.0, 0.0, None, None)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert cu_seqlens_q.numel() == cu_seqlens_k.numel()
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert k.shape[:2] == v.shape[:2]
    assert q.shape[1] % k.shape[1] == 0
    borders_q, borders_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert borders_q[-1] == q.shape[0]
    assert borders_k[-1] <= k.shape[0]
    k, v = (_Poison.apply(x, borders_k[-1]) for x in (k, v))
    shares = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs, lses = [], []
    for (q0, q1), (k0, k1) in zip(pairwise(borders_q), pairwise(borders_k), strict=True):
        assert 0 <= q1 - q0 <= max_seqlen_q
        assert 0 <= k1 - k0 <= max_seqlen_k
        keys, values = (x[k0:k1].repeat_interleave(shares, dim=1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale
        seen = visible(q1 - q0, k1 - k0, causal, window_size)
        score = score.masked_fill(~seen, float("-inf"))
        sees_any = seen.any(-1)
        prob = torch.softmax(score.masked_fill(~sees_any[:, None], 0.0), -1) * sees_any[:, None]
        outs.append(torch.einsum("hqk,khe->qhe", prob, values))
        lse = score.logsumexp(-1) if k1 > k0 else score.new_full(score.shape[:2], float("-inf"))
        lses.append(lse.masked_fill(~sees_any, float("inf")))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse, None) if return_attn_probs else out
