"""Mean of every compression block (phi = `avg`) on packed documents, and its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.document_slots import locate, num_slots, tile_documents
from nsa_core.kernels.triton.launcher import run

_BLOCKS = 8  # compressed blocks of one program


@triton.jit
def _pool_kernel(
    X, POOLED, DOCUMENT, CU, SPAN: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Means of BLOCKS blocks of one document and group."""
    g = tl.program_id(1)
    start, length, tile = locate(DOCUMENT, CU, tl.program_id(0), BLOCKS * STRIDE)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    exists = (block * STRIDE + SPAN <= length)[:, None]
    dd = tl.arange(0, D)[None, :]
    total = tl.zeros([BLOCKS, D], tl.float32)
    row = (start + block * STRIDE).to(tl.int64)[:, None]
    for i in range(SPAN):
        at = ((row + i) * G + g) * D + dd
        total += tl.load(X + at, mask=exists, other=0.0).to(tl.float32)
    slot = (start // STRIDE + block).to(tl.int64)[:, None]
    mean = (total / SPAN).to(POOLED.dtype.element_ty)
    tl.store(POOLED + (slot * G + g) * D + dd, mean, mask=exists)


@triton.jit
def _pool_gradient_kernel(
    GRAD, DX, DOCUMENT, CU, SPAN: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradient of TOKENS tokens: each lies in at most SPAN / STRIDE blocks."""
    g = tl.program_id(1)
    start, length, tile = locate(DOCUMENT, CU, tl.program_id(0), TOKENS)
    position = tile * TOKENS + tl.arange(0, TOKENS)
    dd = tl.arange(0, D)[None, :]
    total = tl.zeros([TOKENS, D], tl.float32)
    for i in range(SPAN // STRIDE):
        block = position // STRIDE - i
        exists = ((block >= 0) & (block * STRIDE + SPAN <= length) & (position < length))[:, None]
        slot = (start // STRIDE + block).to(tl.int64)[:, None]
        at = (slot * G + g) * D + dd
        total += tl.load(GRAD + at, mask=exists, other=0.0).to(tl.float32)
    row = (start + position).to(tl.int64)[:, None]
    dx = (total / SPAN).to(DX.dtype.element_ty)
    tl.store(DX + (row * G + g) * D + dd, dx, mask=(position < length)[:, None])


def pool(x: Tensor, cu_seqlens: Tensor, span: int, stride: int) -> Tensor:
    """Means [N // d, G, D] of the blocks of x [N, G, D]; unused slots are zero."""
    num_tokens, groups, width = x.shape
    pooled = x.new_zeros(num_tokens // stride, groups, width)
    tile = _BLOCKS * stride
    document = tile_documents(cu_seqlens, num_tokens, tile)
    run(
        _pool_kernel,
        (document.numel(), groups),
        x,
        pooled,
        document,
        cu_seqlens,
        span,
        stride,
        groups,
        width,
        _BLOCKS,
    )
    return pooled


def pool_gradient(
    grad: Tensor, cu_seqlens: Tensor, num_tokens: int, span: int, stride: int
) -> Tensor:
    """Gradient of x [N, G, D] from that of its block means."""
    groups, width = grad.shape[1:]
    dx = torch.empty(num_tokens, groups, width, dtype=grad.dtype, device=grad.device)
    tokens = 64
    document = tile_documents(cu_seqlens, num_tokens, tokens)
    grid = (num_slots(num_tokens, cu_seqlens.numel() - 1, tokens), groups)
    run(
        _pool_gradient_kernel, grid, grad, dx, document, cu_seqlens,
        span, stride, groups, width, tokens,
    )  # fmt: skip
    return dx
