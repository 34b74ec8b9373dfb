"""The gated sum of the three branches (arXiv 2502.11089, Eq. 5).

Legend: N tokens, H query heads, E value width.
"""

import torch
from torch import Tensor


def gated_sum(gate_NH3: Tensor, outs_NHE: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Weigh (compressed, selected, sliding) in at least float32; [N, H, E] in their own dtype."""
    dtype = outs_NHE[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    gate_cmp, gate_slc, gate_win = gate_NH3.unsqueeze(-1).unbind(dim=-2)
    out_cmp, out_slc, out_win = (out.to(wide) for out in outs_NHE)
    return (gate_cmp * out_cmp + gate_slc * out_slc + gate_win * out_win).to(dtype)
