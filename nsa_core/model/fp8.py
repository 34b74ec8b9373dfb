"""The products of an MLP by 8-bit floating-point numbers, in steps that train.

Legend: N tokens, W model width, H hidden width, Y columns of the first product (2 H if gated);
I inputs and O outputs of any weight; R rows of K numbers, which are multiplied with the M rows of
another matrix.

Values and weights are e4m3, gradients e5m2 (Micikevicius et al., arXiv 2209.05433). Each row has a
scale of its own: one scale for a whole matrix would let a token's result depend on later tokens.
Scales are powers of two. They change no bit but the exponent, so a scale can move from one factor
of a product to the other: every matrix is rounded once, and backward multiplies by the same
numbers as forward.

One function has the whole MLP. Between two products, numbers are activated, scaled and rounded
in one pass, and a gated gradient is never written side by side before it is rounded, which the
compiler would do for a `chunk` outside.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The largest number of a scaled row is in [2^top, 2^(top + 1)), below 448 and 57,344.
_TOP = {E4M3: 7, E5M2: 14}
_MANTISSA_BITS, _BIAS, _SPECIAL = 23, 127, 255  # of float32
#: Of a row of zeros. That of e4m3 is near those of other rows, because the gradient of a weight's
#: row is multiplied by the row's scale before it is rounded beside the others.
_LEAST_EXPONENT = {E4M3: -24, E5M2: -100}
#: Of a row that holds NaN or infinity, and far from any other: its scale stays infinite whatever is
#: added, so that no product hides it.
_NOT_FINITE = 1000


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, exact: at least 2^-126, and infinite from 2^128 on."""
    lowest, highest = 1 - _BIAS, _SPECIAL - _BIAS
    return ((exponent.clamp(lowest, highest) + _BIAS) << _MANTISSA_BITS).view(torch.float32)


#: Rows of 8-bit numbers [R, K], and the int32 exponents [R, 1] of their scales.
Rows = tuple[Tensor, Tensor]


def quantise_rows(pieces: Sequence[Tensor], dtype: torch.dtype) -> Rows:
    """Round each row to 8 bits after scaling it by a power of two.

    Scaling is exact in bfloat16 and wider types, which have the exponents of float32.

    Args:
        pieces: Matrices [R, K'] that stand side by side.
        dtype: e4m3 or e5m2.

    Returns:
        Numbers and exponents: a row is about numbers * 2^exponent. An error is at most 1/16 of the
        number for e4m3 and 1/8 for e5m2, or 2^-17 and 2^-31 of the largest number of the row, or
        for e4m3 2^-34, whichever is most.
    """
    peaks = [piece.abs().amax(dim=-1, keepdim=True).float() for piece in pieces]
    field_R1 = reduce(torch.maximum, peaks).view(torch.int32) >> _MANTISSA_BITS
    exponent_R1 = (field_R1 - _BIAS - _TOP[dtype]).clamp(min=_LEAST_EXPONENT[dtype])
    exponent_R1 = exponent_R1.masked_fill(field_R1 == _SPECIAL, _NOT_FINITE)
    scale_R1 = power_of_two(-exponent_R1)
    numbers = [(piece * scale_R1.to(piece.dtype)).to(dtype) for piece in pieces]
    if len(numbers) == 1:
        return numbers[0], exponent_R1
    # as bytes: autocast, under which the tracer runs backward, joins no 8-bit numbers
    whole = torch.cat([part.view(torch.uint8) for part in numbers], dim=-1)
    return whole.view(dtype), exponent_R1


def multiply(left: Rows, right: Rows, *, is_fast: bool = False) -> Tensor:
    """Left @ right.T [M, R] in bfloat16.

    Args:
        left: e4m3 or e5m2, contiguous, M rows.
        right: e4m3, contiguous. K and R are multiples of 16.
        is_fast: Let Hopper's tensor cores keep partial sums of fewer than 24 bits: for sums over
            the width of a model, not for those over all tokens.
    """
    (left_MK, exponent_M1), (right_RK, exponent_R1) = left, right
    product: Tensor = torch._scaled_mm(
        left_MK,
        right_RK.mT,
        scale_a=power_of_two(exponent_M1),
        scale_b=power_of_two(exponent_R1).view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )
    return product


def multiply_gradients(pieces_NO: Sequence[Tensor], x: Rows, weight: Rows) -> tuple[Tensor, Tensor]:
    """Gradients [N, I] and [O, I] in bfloat16 of both factors of `multiply(x, weight)`.

    The scales of the weight's rows lie in the sum over O, and those of the tokens in the sum over
    N, where no product takes them: they are multiplied into the gradient.

    Args:
        pieces_NO: Gradient of the product, cut by columns; rounded here to e5m2.
        x: N rows.
        weight: O rows.
    """
    (x_NI, x_exponent), (weight_OI, weight_exponent) = x, weight
    widths = [piece.shape[1] for piece in pieces_NO]
    scales = torch.split(power_of_two(weight_exponent).mT, widths, dim=1)
    scaled = [piece.float() * scale for piece, scale in zip(pieces_NO, scales, strict=True)]
    grad_NO, grad_exponent = quantise_rows(scaled, E5M2)
    grad_x = multiply((grad_NO, grad_exponent), _transposed(weight_OI))
    shift_N1 = grad_exponent + x_exponent
    most = shift_N1.amax()
    moved_NO = (grad_NO.float() * power_of_two(shift_N1 - most)).to(E5M2)
    return grad_x, multiply((moved_NO.mT.contiguous(), most - weight_exponent), _transposed(x_NI))


def _transposed(numbers_RK: Tensor) -> Rows:
    """Columns as rows without a scale."""
    exponents = numbers_RK.new_zeros((numbers_RK.shape[1], 1), dtype=torch.int32)
    return numbers_RK.mT.contiguous(), exponents


def _activate(inner_NY: Tensor, *, is_gated: bool) -> Tensor:
    """What goes into the second product [N, H], in float32."""
    inner_NY = inner_NY.float()
    if not is_gated:
        return F.silu(inner_NY)
    gate_NH, value_NH = inner_NY.chunk(2, dim=-1)
    return F.silu(gate_NH) * value_NH


def _activation_gradients(inner_NY: Tensor, grad_NH: Tensor, *, is_gated: bool) -> list[Tensor]:
    """Gradient of the first product from that of `_activate`: of the gate and of the value."""
    inner_NY, grad_NH = inner_NY.float(), grad_NH.float()
    gate_NH, *value_NH = inner_NY.chunk(2, dim=-1) if is_gated else (inner_NY,)
    share_NH = gate_NH.sigmoid()
    slope_NH = share_NH * (1 + gate_NH * (1 - share_NH))
    if not value_NH:
        return [grad_NH * slope_NH]
    return [grad_NH * value_NH[0] * slope_NH, grad_NH * gate_NH * share_NH]


class _MLP(torch.autograd.Function):
    """Both products and their four gradients, each a product of 8-bit numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        up_YW: Tensor,
        down_WH: Tensor,
        is_gated: bool,  # noqa: FBT001 - torch passes every input by its place
    ) -> Tensor:
        """The output [N, W] in bfloat16."""
        x, up, down = (quantise_rows([matrix], E4M3) for matrix in (x_NW, up_YW, down_WH))
        inner_NY = multiply(x, up, is_fast=True)
        hidden = quantise_rows([_activate(inner_NY, is_gated=is_gated)], E4M3)
        ctx.save_for_backward(*x, *up, inner_NY, *hidden, *down)
        ctx.is_gated = is_gated
        ctx.dtypes = (x_NW.dtype, up_YW.dtype, down_WH.dtype)
        return multiply(hidden, down, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of the input and of both weights."""
        x_NW, x_exp, up_YW, up_exp, inner_NY, hidden_NH, hidden_exp, down_WH, down_exp = (
            ctx.saved_tensors
        )
        grad_hidden, grad_down = multiply_gradients(
            grads, (hidden_NH, hidden_exp), (down_WH, down_exp)
        )
        pieces = _activation_gradients(inner_NY, grad_hidden, is_gated=ctx.is_gated)
        grad_x, grad_up = multiply_gradients(pieces, (x_NW, x_exp), (up_YW, up_exp))
        x_dtype, up_dtype, down_dtype = ctx.dtypes
        return grad_x.to(x_dtype), grad_up.to(up_dtype), grad_down.to(down_dtype), None


def fp8_mlp(x_NW: Tensor, up_YW: Tensor, down_WH: Tensor, *, is_gated: bool) -> Tensor:
    """SwiGLU or SiLU between two products [N, W] in bfloat16, all products of 8-bit numbers.

    N, W and H are multiples of 16. Nothing is kept from one step to the next.
    """
    out: Tensor = _MLP.apply(  # type: ignore[no-untyped-call]  # torch's own
        x_NW, up_YW, down_WH, is_gated
    )
    return out
