"""What the gates and the block choice did in the last forward pass.

Kept on the device until it is read, so that recording needs no host synchronisation.
Legend: N tokens, H heads, G groups, S = num_selected, M figures.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.kernels.geometry import is_forced

#: A (token, head) counts as collapsed below this entropy (nats) with a share above the next one.
COLLAPSE_ENTROPY = 0.1
COLLAPSE_SHARE = 0.95


@dataclass(frozen=True)
class LayerStatistics:
    """Gate and selection figures of one layer, over all tokens and heads.

    Attributes:
        entropy_mean: Mean entropy of the normalised branch shares, in nats (at most ln 3).
        max_gate: Mean of the largest share.
        collapse_frac: Share of (token, head) that uses one branch only.
        selected_blocks: Mean number of blocks chosen per token and group.
        free_block_share: Share of chosen blocks that were not forced.
    """

    layer: int
    entropy_mean: float
    entropy_min: float
    max_gate: float
    collapse_frac: float
    branch_shares: tuple[float, float, float]
    selected_blocks: float
    free_block_share: float


@dataclass(frozen=True)
class AttentionStatistics:
    """All layers, and the one whose gates are nearest to collapse."""

    layers: tuple[LayerStatistics, ...]

    @property
    def worst(self) -> LayerStatistics:
        """The layer with the lowest mean entropy."""
        return min(self.layers, key=lambda layer: layer.entropy_mean)


@torch.no_grad()
def measure(gate_NH3: Tensor, ids_NGS: Tensor, position_N: Tensor, select_block: int) -> Tensor:
    """The figures of one layer as one small tensor [M] on the device."""
    gate_NH3 = gate_NH3.float()
    share_NH3 = gate_NH3 / gate_NH3.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    entropy_NH = torch.special.entr(share_NH3).sum(dim=-1)
    top_NH = share_NH3.amax(dim=-1)
    is_collapsed_NH = (entropy_NH < COLLAPSE_ENTROPY) & (top_NH > COLLAPSE_SHARE)
    is_chosen_NGS = ids_NGS >= 0
    current_N11 = (position_N // select_block)[:, None, None]
    num_chosen = is_chosen_NGS.sum()
    num_free = (is_chosen_NGS & ~is_forced(ids_NGS, current_N11)).sum()
    figures = (
        entropy_NH.mean(),
        entropy_NH.min(),
        top_NH.mean(),
        is_collapsed_NH.float().mean(),
        *share_NH3.mean(dim=(0, 1)),
        num_chosen / (ids_NGS.shape[0] * ids_NGS.shape[1]),
        num_free / num_chosen.clamp_min(1),
    )
    return torch.stack([figure.float() for figure in figures])


def read_statistics(figures: dict[int, Tensor]) -> AttentionStatistics:
    """Bring the figures of each layer to the host; this is where the device is waited for."""
    layers = []
    rows = torch.stack([figures[layer] for layer in sorted(figures)]).tolist()
    for layer, row in zip(sorted(figures), rows, strict=True):
        entropy_mean, entropy_min, top, collapsed, cmp, slc, win, chosen, free = row
        layers.append(
            LayerStatistics(
                layer=layer,
                entropy_mean=min(entropy_mean, math.log(3)),
                entropy_min=entropy_min,
                max_gate=top,
                collapse_frac=collapsed,
                branch_shares=(cmp, slc, win),
                selected_blocks=chosen,
                free_block_share=free,
            )
        )
    return AttentionStatistics(tuple(layers))
