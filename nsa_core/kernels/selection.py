"""From the compressed branch's probabilities to the blocks each token attends to (Eq. 8-12).

Legend: G groups, C compressed blocks of a document, J selection blocks, S = num_selected.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa_core.kernels.geometry import BlockGeometry, is_forced


def select_scores(prob_C: Tensor, num_blocks: int, geometry: BlockGeometry) -> Tensor:
    """Importance [..., J] of the selection blocks from that of the compressed blocks (Eq. 9).

    Args:
        prob_C: [..., C], compressed probabilities in document order, 0 where nothing is visible.
        num_blocks: J.
        geometry: Block sizes.

    The terms of every block are added in the same order, so equal blocks tie exactly.
    """
    weights, step = geometry.overlap_weights, geometry.compressed_per_select
    before = -geometry.first_overlap(0)
    needed = (num_blocks - 1) * step + len(weights)
    padded_C = F.pad(prob_C, (before, max(0, needed - before - prob_C.shape[-1])))
    score_J = torch.zeros((), dtype=prob_C.dtype, device=prob_C.device)
    for offset, weight in enumerate(weights):
        stop = offset + (num_blocks - 1) * step + 1
        score_J = score_J + weight * padded_C[..., offset:stop:step]
    return score_J


def choose_blocks(score_GJ: Tensor, position: Tensor, geometry: BlockGeometry) -> Tensor:
    """Forced blocks and the best of the rest; the lowest index wins an exact tie (Eq. 11).

    Args:
        score_GJ: [..., G, J] importance.
        position: [...] position of each token within its document.
        geometry: Block sizes.

    Returns:
        ids [..., G, S] int32, ascending, -1 as padding at the end.
    """
    num_blocks, num_selected = score_GJ.shape[-1], geometry.num_selected
    block_J = torch.arange(num_blocks, device=score_GJ.device)
    current = (position // geometry.select_block)[..., None, None]
    ranked = score_GJ.masked_fill(is_forced(block_J, current), float("inf"))
    ranked = ranked.masked_fill(block_J > current, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :num_selected]
    chosen = torch.where(order <= current, order, num_blocks).sort(dim=-1).values
    ids = torch.where(chosen < num_blocks, chosen, -1).int()
    return F.pad(ids, (0, num_selected - ids.shape[-1]), value=-1)
