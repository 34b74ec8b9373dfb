"""Cross-entropy from hidden states in chunks, so that the logits never exist at once.

Legend: N tokens, W model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Logits that exist at one time.
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**26}
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


def loss_sum(hidden_NW: Tensor, weight_VW: Tensor, target_N: Tensor) -> LossSum:
    """Cross-entropy of `hidden @ weight.T` against the targets; -1 is left out.

    The matrix products run in the autocast dtype, everything else in at least float32.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_NW.requires_grad or weight_VW.requires_grad)
    total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden_NW, weight_VW, target_N, needs_grad
    )
    return LossSum(total, (target_N != IGNORED_TARGET).sum().float())


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
        needs_grad: bool,  # noqa: FBT001 - torch passes the arguments by position
    ) -> Tensor:
        """Sum of the losses."""
        device = hidden_NW.device.type
        is_half = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if is_half else hidden_NW.dtype
        with torch.autocast(device, enabled=False):
            total, grads = _loss_and_gradients(
                hidden_NW.to(compute),
                weight_VW.to(compute),
                target_N,
                needs_grad=needs_grad,
            )
        ctx.dtypes = (hidden_NW.dtype, weight_VW.dtype)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale what the forward pass has computed."""
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grads[0]
        return (
            (grad_hidden * scale).to(hidden_dtype),
            (grad_weight * scale).to(weight_dtype),
            None,
            None,
        )


def _loss_and_gradients(
    hidden_NW: Tensor, weight_VW: Tensor, target_N: Tensor, *, needs_grad: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    wide = torch.promote_types(hidden_NW.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden_NW.device)
    grad_weight = torch.zeros_like(weight_VW, dtype=wide) if needs_grad else total
    grads_hidden = []
    size = max(1, CHUNK_LOGITS[hidden_NW.device.type] // weight_VW.shape[0])
    for hidden, target in zip(
        torch.split(hidden_NW, size), torch.split(target_N, size), strict=True
    ):
        logits = (hidden @ weight_VW.mT).to(wide)
        is_used = target != IGNORED_TARGET
        column = target.clamp_min(0).unsqueeze(-1)
        lse = logits.logsumexp(dim=-1, keepdim=True)
        total += ((lse - logits.gather(-1, column)).squeeze(-1) * is_used).sum()
        if needs_grad:
            grad_logits = logits.sub_(lse).exp_()
            grad_logits.scatter_add_(-1, column, torch.full_like(lse, -1.0))
            grad_logits = (grad_logits * is_used.unsqueeze(-1)).to(hidden.dtype)
            grads_hidden.append((grad_logits @ weight_VW).to(wide))
            grad_weight += grad_logits.mT @ hidden
    return total, ((torch.cat(grads_hidden), grad_weight) if needs_grad else ())
