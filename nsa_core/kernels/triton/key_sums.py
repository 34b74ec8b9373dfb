"""Float32 sums of the gradients of keys and values, for programs that share them."""

import torch
from torch import Tensor


def new_sums(k: Tensor, v: Tensor, copies: int = 1) -> tuple[Tensor, Tensor]:
    """Zeros [copies, *k.shape] and [copies, *v.shape]; one launch fills both."""
    num_k, num_v = copies * k.numel(), copies * v.numel()
    zeros = k.new_zeros(num_k + num_v, dtype=torch.float32)
    return (
        zeros[:num_k].view(copies, *k.shape),
        zeros[num_k:].view(copies, *v.shape),
    )


def round_sums(sums: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
    """Add the copies up, in order, and round them to the gradients' dtype; one launch for both."""
    totals = [of.sum(0) if len(of) > 1 else of[0] for of in sums]
    torch._foreach_copy_(list(into), totals)
