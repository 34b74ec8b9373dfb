"""Cross-entropy of rows of logits, which it turns into their gradient in place.

Legend: R rows, V vocabulary. A row is read twice, and the second time it comes from the L2 cache,
so the logits cross the memory bus once each way. Sums are float32, in base 2, one per lane until
the end of the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.rows import LN2, LOG2E, LOWEST
from nsa_core.kernels.triton.sizes import next_power_of_2

#: Logits of a row that are in flight; with 8 warps 16 of them lie in each lane.
_MAX_TILE = 4096
_NUM_WARPS = 8


@triton.jit
def _cross_entropy_kernel(
    LOGITS, TARGET, LOSS, V: tl.constexpr, BV: tl.constexpr, GRADIENT: tl.constexpr
):
    """One row: loss, and softmax minus one-hot over the logits (GRADIENT); 0 for target -1."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    base = LOGITS + row * V
    wanted = tl.load(base + tl.maximum(target, 0)).to(tl.float32) * LOG2E  # before it is gone
    column = tl.arange(0, BV)
    peak = tl.full([BV], LOWEST, tl.float32)
    total = tl.zeros([BV], tl.float32)
    for start in range(0, V, BV):
        inside = start + column < V
        score = tl.load(
            base + start + column, mask=inside, other=-float("inf"), eviction_policy="evict_last"
        )
        score = score.to(tl.float32) * LOG2E
        raised = tl.maximum(peak, score)
        total = total * tl.exp2(peak - raised) + tl.exp2(score - raised)
        peak = raised
    top = tl.max(peak, 0)
    spread = tl.log2(tl.sum(total * tl.exp2(peak - top), 0))  # apart from `top`: no cancellation
    is_used = target >= 0
    tl.store(LOSS + row, tl.where(is_used, (top - wanted + spread) * LN2, 0.0))
    if GRADIENT:
        for start in range(0, V, BV):
            inside = start + column < V
            at = base + start + column
            score = tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
            gradient = tl.exp2(score - top - spread) - tl.where(start + column == target, 1.0, 0.0)
            gradient = tl.where(is_used, gradient, 0.0)
            tl.store(at, gradient.to(LOGITS.dtype.element_ty), mask=inside)


def cross_entropy_(logits_RV: Tensor, target_R: Tensor, *, with_gradient: bool) -> Tensor:
    """Loss [R] float32 of each row; the logits become their gradients if wanted.

    Args:
        logits_RV: Contiguous, of any floating dtype; overwritten if `with_gradient`.
        target_R: int64 ids below V; -1 gives loss 0 and gradient 0.
        with_gradient: Turn the logits into d loss / d logits.
    """
    num_rows, vocabulary = logits_RV.shape
    loss_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    tile = min(_MAX_TILE, next_power_of_2(vocabulary))
    if num_rows:
        _cross_entropy_kernel[(num_rows,)](
            logits_RV, target_R, loss_R, vocabulary, tile, with_gradient, num_warps=_NUM_WARPS
        )
    return loss_R
