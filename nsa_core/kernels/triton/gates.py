"""Row-wise kernels around attention: the gated sum, and what every backward starts from.

Backward kernels take, per row, `delta` = sum(grad * out) and `offset` = log2(normaliser) -
log2(gate): exp2(score - offset) is then gate * probability, so the gate costs the attention
kernels nothing and the gradient of the gated output needs no scaled copy. A row that sees nothing,
or a gate of zero, has offset +inf. The gradient of a gate is its branch's delta.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.rows import INFINITY, LOG2E


@triton.jit
def _branch_offset(LSE, gate, row, inside):
    lse = tl.load(LSE + row, mask=inside, other=0.0)
    return tl.where(lse == -INFINITY, INFINITY, lse * LOG2E - tl.log2(gate))


@triton.jit
def _branch_delta(OUT, grad, at, inside):
    out = tl.load(OUT + at, mask=inside[:, None], other=0.0).to(tl.float32)
    return tl.sum(out * grad, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _prepare_kernel(GRAD, OUT, LSE, OFFSET, DELTA, num_rows, E: tl.constexpr, BM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < num_rows
    at = row[:, None] * E + tl.arange(0, E)[None, :]
    grad = tl.load(GRAD + at, mask=inside[:, None], other=0.0).to(tl.float32)
    gate = tl.full([BM], 1.0, tl.float32)
    tl.store(DELTA + row, _branch_delta(OUT, grad, at, inside), mask=inside)
    tl.store(OFFSET + row, _branch_offset(LSE, gate, row, inside), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _mix_kernel(O1, O2, O3, GATE, OUT, num_rows, E: tl.constexpr, BM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < num_rows
    at = row[:, None] * E + tl.arange(0, E)[None, :]
    held = inside[:, None]
    out = tl.zeros([BM, E], tl.float32)
    for branch in tl.static_range(3):
        gate = tl.load(GATE + row * 3 + branch, mask=inside, other=0.0).to(tl.float32)
        if branch == 0:
            part = tl.load(O1 + at, mask=held, other=0.0)
        elif branch == 1:
            part = tl.load(O2 + at, mask=held, other=0.0)
        else:
            part = tl.load(O3 + at, mask=held, other=0.0)
        out += gate[:, None] * part.to(tl.float32)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def _mix_prepare_kernel(
    GRAD, O1, O2, O3, LSE, GATE, DGATE, OFFSET, DELTA, num_rows, E: tl.constexpr, BM: tl.constexpr
):
    """LSE, OFFSET, DELTA [3, rows]; GATE, DGATE [rows, 3]."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < num_rows
    at = row[:, None] * E + tl.arange(0, E)[None, :]
    grad = tl.load(GRAD + at, mask=inside[:, None], other=0.0).to(tl.float32)
    for branch in tl.static_range(3):
        gate = tl.load(GATE + row * 3 + branch, mask=inside, other=1.0).to(tl.float32)
        if branch == 0:
            delta = _branch_delta(O1, grad, at, inside)
        elif branch == 1:
            delta = _branch_delta(O2, grad, at, inside)
        else:
            delta = _branch_delta(O3, grad, at, inside)
        plane = branch * num_rows.to(tl.int64)
        offset = _branch_offset(LSE + plane, gate, row, inside)
        tl.store(DELTA + plane + row, delta, mask=inside)
        tl.store(OFFSET + plane + row, offset, mask=inside)
        tl.store(DGATE + row * 3 + branch, delta.to(DGATE.dtype.element_ty), mask=inside)


def _row_grid(num_rows: int, width: int) -> tuple[tuple[int], int]:
    rows = max(16, 8192 // width)
    return (triton.cdiv(num_rows, rows),), rows


def prepare(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(offset, delta) [N, H] float32 of one branch from its output, natural lse and gradient."""
    offset, delta = torch.empty_like(lse), torch.empty_like(lse)
    grid, rows = _row_grid(lse.numel(), out.shape[-1])
    _prepare_kernel[grid](grad, out, lse, offset, delta, lse.numel(), out.shape[-1], rows)
    return offset, delta


def mix(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Sum the branches [N, H, E] weighted by gates [N, H, 3], in float32, rounded once."""
    out = torch.empty_like(branches[0])
    num_rows, width = gates.numel() // 3, out.shape[-1]
    grid, rows = _row_grid(num_rows, width)
    _mix_kernel[grid](*branches, gates, out, num_rows, width, rows)
    return out


def mix_prepare(
    grad: Tensor, branches: tuple[Tensor, Tensor, Tensor], lse: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(offset [3, N, H], delta [3, N, H], gradient of the gates [N, H, 3]) in one pass."""
    offset, delta, dgates = torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(gates)
    num_rows, width = gates.numel() // 3, grad.shape[-1]
    grid, rows = _row_grid(num_rows, width)
    _mix_prepare_kernel[grid](
        grad, *branches, lse, gates, dgates, offset, delta, num_rows, width, rows
    )
    return offset, delta, dgates
