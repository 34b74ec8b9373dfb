"""Row-wise kernels around attention: the gated sum, and what every backward starts from.

Backward kernels take, per row, `delta` = sum(grad * out) and `offset` = log2(normaliser) -
log2(gate): exp2(score - offset) is then gate * probability, so the gate costs the attention
kernels nothing and the gradient of the gated output needs no scaled copy. A row that sees nothing,
or a gate of zero, has offset +inf. The gradient of a gate is its branch's delta.
Kernels that walk over the tokens of one head read the same numbers by head.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.document_slots import Documents, locate
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import INFINITY, LOG2E, pack_terms
from nsa_core.kernels.triton.sizes import cdiv

_MIXED_ELEMENTS = 4096  # of each of the four tensors that a program holds at once


@triton.jit
def _branch_offset(LSE, gate, row, inside):
    lse = tl.load(LSE + row, mask=inside, other=0.0)
    return tl.where(lse == -INFINITY, INFINITY, lse * LOG2E - tl.log2(gate))


@triton.jit
def _branch_delta(OUT, grad, at, inside):
    out = tl.load(OUT + at, mask=inside[:, None], other=0.0).to(tl.float32)
    return tl.sum(out * grad, 1)


@triton.jit
def _rows_of_slot(DOCUMENT, CU, H: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr):
    """(rows, rows by head without the head's own offset, head, inside) of this program."""
    PARTS: tl.constexpr = BLOCK * H // BM
    slot = tl.program_id(0) // PARTS
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    within = (tl.program_id(0) % PARTS) * BM + tl.arange(0, BM)
    position = block * BLOCK + within // H
    row = (start + block * BLOCK).to(tl.int64) * H + within
    return row, slot * BLOCK + within // H, within % H, position < length


@triton.jit
def _store_by_head(
    BY_HEAD, branch, head, padded, num_padded, offset, delta, inside, H: tl.constexpr
):
    """The terms of rows, packed, or in two planes where rows that do not exist are written too."""
    width = num_padded.to(tl.int64)
    if BY_HEAD.dtype.element_ty == tl.float32:
        at = (2 * branch * H + head) * width + padded
        tl.store(BY_HEAD + at, tl.where(inside, offset, INFINITY))
        tl.store(BY_HEAD + at + H * width, tl.where(inside, delta, 0.0))
    else:
        at = (branch * H + head) * width + padded
        tl.store(BY_HEAD + at, pack_terms(offset, delta), mask=inside)


@triton.jit(do_not_specialize=["num_padded"])
def _prepare_kernel(
    GRAD, OUT, LSE, OFFSET, DELTA, BY_HEAD, DOCUMENT, CU, num_padded,
    H: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    row, padded, head, inside = _rows_of_slot(DOCUMENT, CU, H, BLOCK, BM)
    at = row[:, None] * E + tl.arange(0, E)[None, :]
    grad = tl.load(GRAD + at, mask=inside[:, None], other=0.0).to(tl.float32)
    gate = tl.full([BM], 1.0, tl.float32)
    delta = _branch_delta(OUT, grad, at, inside)
    offset = _branch_offset(LSE, gate, row, inside)
    tl.store(OFFSET + row, offset, mask=inside)
    tl.store(DELTA + row, delta, mask=inside)
    _store_by_head(BY_HEAD, 0, head, padded, num_padded, offset, delta, inside, H)


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


@triton.jit(do_not_specialize=["num_rows", "num_padded"])
def _mix_prepare_kernel(
    GRAD, O1, O2, O3, LSE, GATE, DGATE, OFFSET, DELTA, BY_HEAD, DOCUMENT, CU,
    num_rows, num_padded,
    H: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """LSE, OFFSET, DELTA [3, rows]; GATE, DGATE [rows, 3]; BY_HEAD of three branches.

    All that is read is asked for before anything is stored: no load may pass a store.
    """
    row, padded, head, inside = _rows_of_slot(DOCUMENT, CU, H, BLOCK, BM)
    at = row[:, None] * E + tl.arange(0, E)[None, :]
    rows = num_rows.to(tl.int64)
    grad = tl.load(GRAD + at, mask=inside[:, None], other=0.0)
    out1 = tl.load(O1 + at, mask=inside[:, None], other=0.0)
    out2 = tl.load(O2 + at, mask=inside[:, None], other=0.0)
    out3 = tl.load(O3 + at, mask=inside[:, None], other=0.0)
    gate1 = tl.load(GATE + row * 3, mask=inside, other=1.0).to(tl.float32)
    gate2 = tl.load(GATE + row * 3 + 1, mask=inside, other=1.0).to(tl.float32)
    gate3 = tl.load(GATE + row * 3 + 2, mask=inside, other=1.0).to(tl.float32)
    offset1 = _branch_offset(LSE, gate1, row, inside)
    offset2 = _branch_offset(LSE + rows, gate2, row, inside)
    offset3 = _branch_offset(LSE + 2 * rows, gate3, row, inside)
    grad = grad.to(tl.float32)
    delta1 = tl.sum(out1.to(tl.float32) * grad, 1)
    delta2 = tl.sum(out2.to(tl.float32) * grad, 1)
    delta3 = tl.sum(out3.to(tl.float32) * grad, 1)
    for branch in tl.static_range(3):
        if branch == 0:
            offset, delta = offset1, delta1
        elif branch == 1:
            offset, delta = offset2, delta2
        else:
            offset, delta = offset3, delta3
        plane = branch * rows
        tl.store(OFFSET + plane + row, offset, mask=inside)
        tl.store(DELTA + plane + row, delta, mask=inside)
        _store_by_head(BY_HEAD, branch, head, padded, num_padded, offset, delta, inside, H)
        tl.store(DGATE + row * 3 + branch, delta.to(DGATE.dtype.element_ty), mask=inside)


def _row_grid(num_rows: int, width: int) -> tuple[tuple[int], int]:
    rows = max(16, 8192 // width)
    return (cdiv(num_rows, rows),), rows


@dataclass(frozen=True)
class RowTerms:
    """Offset and delta of every row of one branch.

    `by_head` holds both of them for kernels that walk along the tokens of a head; each document
    begins at a multiple of the query block there, so that loads are aligned. It has one of two
    forms: [H, padded] int64 with both in one (rows.py), or planes [2, H, padded] float32, where the
    rows behind a document's end have offset +inf and delta 0 (Hopper's kernels).
    """

    offset: Tensor  # [N, H] float32
    delta: Tensor  # [N, H] float32
    by_head: Tensor

    @property
    def is_planes(self) -> bool:
        """Whether offset and delta are planes of their own in `by_head`."""
        return self.by_head.dtype == torch.float32


def _new_by_head(
    branches: tuple[int, ...], num_heads: int, docs: Documents, *, planes: bool
) -> Tensor:
    device = docs.cu_seqlens.device
    if planes:
        size = (*branches, 2, num_heads, docs.num_padded)
        return torch.empty(size, dtype=torch.float32, device=device)
    return torch.empty(*branches, num_heads, docs.num_padded, dtype=torch.int64, device=device)


def _slot_tile(num_heads: int, width: int, block: int, elements: int) -> int:
    """Rows of a program: about `elements` in all, and a divisor of the rows of a query block."""
    rows = max(16, elements // width)
    while (block * num_heads) % rows:
        rows //= 2
    return rows


def prepare(grad: Tensor, out: Tensor, lse: Tensor, docs: Documents, *, planes: bool) -> RowTerms:
    """Terms of one branch without a gate from its output, natural lse [N, H] and gradient."""
    num_heads, width = out.shape[1:]
    offset, delta = lse.new_empty(2, *lse.shape)
    by_head = _new_by_head((), num_heads, docs, planes=planes)
    rows = _slot_tile(num_heads, width, docs.block, 8192)
    run(
        _prepare_kernel, (docs.num_slots * (docs.block * num_heads // rows),),
        grad, out, lse, offset, delta, by_head, docs.tile_document, docs.cu_seqlens,
        docs.num_padded, num_heads, width, docs.block, rows,
    )  # fmt: skip
    return RowTerms(offset, delta, by_head)


def mix(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Sum the branches [N, H, E] weighted by gates [N, H, 3], in float32, rounded once."""
    out = torch.empty_like(branches[0])
    num_rows, width = gates.numel() // 3, out.shape[-1]
    grid, rows = _row_grid(num_rows, width)
    run(_mix_kernel, grid, *branches, gates, out, num_rows, width, rows)
    return out


def mix_prepare(
    grad: Tensor, branches: tuple[Tensor, Tensor, Tensor], lse: Tensor, gates: Tensor,
    docs: Documents, *, planes: bool,
) -> tuple[list[RowTerms], Tensor]:  # fmt: skip
    """(terms of the three branches, gradient of the gates [N, H, 3]) in one pass."""
    num_heads, width = grad.shape[1:]
    dgates = torch.empty_like(gates)
    offset, delta = lse.new_empty(2, *lse.shape)
    by_head = _new_by_head((3,), num_heads, docs, planes=planes)
    rows = _slot_tile(num_heads, width, docs.block, _MIXED_ELEMENTS)
    run(
        _mix_prepare_kernel, (docs.num_slots * (docs.block * num_heads // rows),),
        grad, *branches, lse, gates, dgates, offset, delta, by_head,
        docs.tile_document, docs.cu_seqlens, grad.shape[0] * num_heads, docs.num_padded,
        num_heads, width, docs.block, rows,
    )  # fmt: skip
    return [RowTerms(*of) for of in zip(offset, delta, by_head, strict=True)], dgates
