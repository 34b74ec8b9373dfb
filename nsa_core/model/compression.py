"""phi: how a block of keys or values becomes one (paper Eq. 7).

Legend: R blocks, L tokens of a block, G groups, D width of the key or value.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_core.model.layers import widen


class MeanCompression(nn.Module):
    """`avg`: the mean of the block; nothing to learn."""

    def forward(self, block_RLGD: Tensor) -> Tensor:
        """One key a block: [R, G, D]."""
        return widen(block_RLGD).mean(dim=1).to(block_RLGD.dtype)


class LinearCompression(nn.Module):
    """`linear`: one matrix per group on the flattened block; starts as the mean plus noise."""

    def __init__(self, num_groups: int, block: int, width: int) -> None:
        """Make the matrices [G, D, L * D]; `reset` fills them."""
        super().__init__()
        self.block, self.width = block, width
        self.weight = nn.Parameter(torch.empty(num_groups, width, block * width))

    def reset(self, std: float, generator: torch.Generator) -> None:
        """Noise around the matrix that takes the mean."""
        mean = torch.eye(self.width).repeat(1, self.block) / self.block
        with torch.no_grad():
            self.weight.normal_(0.0, std, generator=generator).add_(mean)

    def forward(self, block_RLGD: Tensor) -> Tensor:
        """One key a block: [R, G, D]."""
        flat_GRX = block_RLGD.permute(2, 0, 1, 3).flatten(2)
        return torch.bmm(flat_GRX, self.weight.mT.to(flat_GRX.dtype)).transpose(0, 1)


class MLPCompression(nn.Module):
    """`mlp`: the block's mean plus a small MLP on the flattened block, shared over the groups."""

    def __init__(self, block: int, width: int, hidden: int) -> None:
        """Make the position encoding and both matrices; `reset` fills them."""
        super().__init__()
        self.position_LD = nn.Parameter(torch.empty(block, width))
        self.up = nn.Linear(block * width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def reset(self, std: float, generator: torch.Generator) -> None:
        """Small last layer, so that it starts near the mean, and not zero, so that all learns."""
        with torch.no_grad():
            self.position_LD.normal_(0.0, std, generator=generator)
            self.up.weight.normal_(0.0, self.up.in_features**-0.5, generator=generator)
            self.down.weight.normal_(0.0, std, generator=generator)

    def forward(self, block_RLGD: Tensor) -> Tensor:
        """One key a block: [R, G, D]."""
        encoded_RGLD = block_RLGD.transpose(1, 2) + self.position_LD
        residual_RGD = self.down(F.silu(self.up(encoded_RGLD.flatten(2))))
        pooled_RGD: Tensor = widen(block_RLGD).mean(dim=1) + residual_RGD
        return pooled_RGD.to(block_RLGD.dtype)


Compression = MeanCompression | LinearCompression | MLPCompression


def make_compression(
    kind: str, *, num_groups: int, block: int, width: int, hidden: int
) -> Compression:
    """Make phi for keys or for values of this width."""
    if kind == "avg":
        return MeanCompression()
    if kind == "linear":
        return LinearCompression(num_groups, block, width)
    return MLPCompression(block, width, hidden)
