"""Cross-entropy from hidden states in chunks, so that the logits never exist at once.

Legend: N tokens, R tokens of a chunk, W model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Logits that exist at one time; the Triton kernel needs no second copy of them.
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**26}
CHUNK_LOGITS_IN_PLACE = 2**29
IGNORED_TARGET = -1


@dataclass(frozen=True, eq=False)
class LossSum:
    """Summed loss and the number of targets in it; divide by the count of the whole step.

    Attributes:
        sum: Nats, at least float32, differentiable.
        count: float32 number of targets that are not -1; both stay on the device.
    """

    sum: Tensor
    count: Tensor


def loss_sum(
    hidden_NW: Tensor, weight_VW: Tensor, target_N: Tensor, *, in_place: bool = False
) -> LossSum:
    """Cross-entropy of `hidden @ weight.T` against the targets; -1 is left out.

    The matrix products run in the autocast dtype, everything else in at least float32.

    Args:
        hidden_NW: Hidden states.
        weight_VW: The head.
        target_N: int64 ids, each -1 or 0 .. V - 1. Asking for them would stop a card, so another
            one ends in torch's index error on a processor, in its assertion on a card, and is
            undefined with `in_place`; `train.prepare` refuses a tokenizer with more ids than V.
        in_place: Let a Triton kernel turn the logits into their gradient; speed and memory only.

    Raises:
        ValueError: If there is no token, or sizes or dtypes do not fit together.
    """
    _check_inputs(hidden_NW, weight_VW, target_N)
    needs_grad = torch.is_grad_enabled() and (hidden_NW.requires_grad or weight_VW.requires_grad)
    total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden_NW, weight_VW, target_N, needs_grad, in_place
    )
    return LossSum(total, (target_N != IGNORED_TARGET).sum().float())


def _check_inputs(hidden_NW: Tensor, weight_VW: Tensor, target_N: Tensor) -> None:
    fits = hidden_NW.ndim == weight_VW.ndim == 2 and hidden_NW.shape[1] == weight_VW.shape[1]
    if not fits or target_N.shape != hidden_NW.shape[:1] or not len(target_N):
        shapes = [list(x.shape) for x in (hidden_NW, weight_VW, target_N)]
        message = f"the loss takes [N, W], [V, W] and [N] with at least one token, got {shapes}"
        raise ValueError(message)
    is_floating = hidden_NW.is_floating_point() and weight_VW.is_floating_point()
    if not is_floating or target_N.dtype != torch.int64:
        dtypes = [x.dtype for x in (hidden_NW, weight_VW, target_N)]
        message = f"the loss takes floating-point matrices and int64 targets, got {dtypes}"
        raise ValueError(message)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients with the loss: the backward pass only scales them.

    Whether they are needed is an argument: under torch.compile the forward pass runs without
    gradients and `ctx.needs_input_grad` says no to everything, which made every gradient zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NW: Tensor,
        weight_VW: Tensor,
        target_N: Tensor,
        needs_grad: bool,  # noqa: FBT001 - torch passes every input by its place
        in_place: bool,  # noqa: FBT001 - torch passes every input by its place
    ) -> Tensor:
        """Sum of the losses."""
        device = hidden_NW.device.type
        is_half = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if is_half else hidden_NW.dtype
        with torch.autocast(device, enabled=False):
            found: tuple[Tensor, Tensor, Tensor] = _cross_entropy(
                hidden_NW.to(compute), weight_VW.to(compute), target_N, needs_grad, in_place
            )
        ctx.dtypes = (hidden_NW.dtype, weight_VW.dtype)
        ctx.save_for_backward(*found[1:])
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Scale what the forward pass has computed.

        Raises:
            NotImplementedError: Under create_graph. `once_differentiable` would not notice: it asks
                whether the scale needs a gradient, and here the constants are the other factor.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            message = (
                "the loss has no second derivative: its gradients are made with it, as numbers"
            )
            raise NotImplementedError(message)
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grads[0]
        grad_hidden = grad_hidden.to(grad_weight.dtype) * scale
        return (
            grad_hidden.to(hidden_dtype),
            (grad_weight * scale).to(weight_dtype),
            None,
            None,
            None,
        )


@torch.library.custom_op("nsa::cross_entropy", mutates_args=())
def _cross_entropy(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    target_N: Tensor,
    needs_grad: bool,  # noqa: FBT001 - torch passes every input by its place
    in_place: bool,  # noqa: FBT001 - torch passes every input by its place
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses, and its gradients by both matrices; empty ones if not needed.

    One operator, so that a compiler has nothing to trace in it: traced by torch 2.11, the gradient
    of the hidden states came out as zeros.
    """
    wide = torch.promote_types(hidden_NW.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden_NW.device)
    grad_hidden, grad_weight = _new_gradients(hidden_NW, weight_VW, needs_grad=needs_grad)
    grad_weight.zero_()
    size = _chunk_rows(hidden_NW, weight_VW.shape[0], in_place=in_place)
    chunk_of = _chunk_in_place if in_place else _chunk
    for start in range(0, hidden_NW.shape[0], size):
        rows = slice(start, start + size)
        hidden = hidden_NW[rows]
        loss_R, grad_logits = chunk_of(hidden @ weight_VW.mT, target_N[rows], needs_grad=needs_grad)
        total += loss_R.sum()
        if needs_grad:
            torch.mm(grad_logits, weight_VW, out=grad_hidden[rows])
            _add_product(grad_weight, grad_logits.mT, hidden)
    return total, grad_hidden, grad_weight


@_cross_entropy.register_fake
def _fake_cross_entropy(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    target_N: Tensor,
    needs_grad: bool,  # noqa: FBT001 - see above
    in_place: bool,  # noqa: FBT001 - see above
) -> tuple[Tensor, Tensor, Tensor]:
    del target_N, in_place
    total = hidden_NW.new_empty((), dtype=torch.promote_types(hidden_NW.dtype, torch.float32))
    return total, *_new_gradients(hidden_NW, weight_VW, needs_grad=needs_grad)


def _new_gradients(
    hidden_NW: Tensor, weight_VW: Tensor, *, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Memory for both gradients, the one that is summed in at least float32."""
    if not needs_grad:
        return hidden_NW.new_empty(0), hidden_NW.new_empty(0)
    wide = torch.promote_types(hidden_NW.dtype, torch.float32)
    return (
        torch.empty_like(hidden_NW, memory_format=torch.contiguous_format),
        weight_VW.new_empty(weight_VW.shape, dtype=wide),
    )


def _chunk_rows(hidden_NW: Tensor, vocabulary: int, *, in_place: bool) -> int:
    """Rows of a chunk, a power of two: whole tiles for the matrix products."""
    limit = CHUNK_LOGITS_IN_PLACE if in_place else CHUNK_LOGITS[hidden_NW.device.type]
    return 1 << (max(1, limit // vocabulary).bit_length() - 1)


def _chunk(logits_RV: Tensor, target_R: Tensor, *, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Losses [R], and the gradient of the logits in their own dtype if it is needed."""
    dtype = logits_RV.dtype
    logits_RV = logits_RV.to(torch.promote_types(dtype, torch.float32))
    is_used_R1 = (target_R != IGNORED_TARGET).unsqueeze(-1)
    column_R1 = target_R.masked_fill(target_R == IGNORED_TARGET, 0).unsqueeze(-1)
    lse_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
    loss_R1 = torch.where(is_used_R1, lse_R1 - logits_RV.gather(-1, column_R1), 0.0)
    if needs_grad:
        logits_RV = logits_RV.sub_(lse_R1).exp_()
        logits_RV.scatter_add_(-1, column_R1, torch.full_like(lse_R1, -1.0))
        logits_RV = torch.where(is_used_R1, logits_RV, 0.0).to(dtype)
    return loss_R1.squeeze(-1), logits_RV


def _chunk_in_place(
    logits_RV: Tensor, target_R: Tensor, *, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Like `_chunk`, in one kernel and without a copy of the logits."""
    from nsa_core.kernels.triton.cross_entropy import cross_entropy_  # Triton is optional

    return cross_entropy_(logits_RV, target_R.contiguous(), with_gradient=needs_grad), logits_RV


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, summed in its dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
