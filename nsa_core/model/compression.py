"""phi: how a block of keys or values becomes one (paper Eq. 7).

Decode gives whole blocks. Training gives the strides that they consist of, one after the other:
whatever is linear in a block is a sum over its strides, so that no token is copied into both blocks
that hold it, and products and gradients read and write each once. Stride c is the first of block c.

Legend: R blocks, L tokens of a block, G groups, D width of the key or value, C strides, d tokens of
a stride.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import CompressedSlots, Packing
from nsa_core.model.layers import widen


def cut_strides(
    x_NGD: Tensor, geometry: BlockGeometry, packing: Packing, slots: CompressedSlots
) -> Tensor:
    """The tokens [C, d, G, D] of every stride of the documents; anything in slots without a block.

    A compression block is l / d strides of its document that follow each other, and so do their
    slots. Of equally long documents of whole strides they are the tokens as they lie, without a
    gather.
    """
    stride, length = geometry.compress_stride, packing.uniform_length
    if length is not None and length % stride == 0:
        return x_NGD.reshape(-1, stride, *x_NGD.shape[1:])
    offsets = torch.arange(stride, device=x_NGD.device)
    row_Cd = slots.first_row_C[:, None] + offsets
    flat = x_NGD.index_select(0, row_Cd.clamp_(max=len(x_NGD) - 1).flatten())
    return flat.view(*row_Cd.shape, *x_NGD.shape[1:])


def join_strides(parts: Sequence[Tensor]) -> Tensor:
    """The sum over j of what part j has at slot c + j, for every slot c, in at least float32.

    Part j [C, ...] holds what every stride gives to the block whose stride number j it is. Behind
    the last stride there are zeros.
    """
    total = widen(parts[0])
    for by, part in enumerate(parts[1:], start=1):
        kept = widen(part)[min(by, len(part)) :]
        total = total + F.pad(kept, (0, 0) * (kept.ndim - 1) + (0, len(part) - len(kept)))
    return total


def _mean_of_strides(strides_CdGD: Tensor, num_strides: int) -> Tensor:
    """Means [C, G, D] of the blocks, in at least float32."""
    share_CGD = widen(strides_CdGD).mean(dim=1) / num_strides
    return join_strides([share_CGD] * num_strides)


class MeanCompression(nn.Module):
    """`avg`: the mean of the block; nothing to learn."""

    def forward(self, block_RLGD: Tensor) -> Tensor:
        """One key a block: [R, G, D]."""
        return widen(block_RLGD).mean(dim=1).to(block_RLGD.dtype)

    def of_strides(self, strides_CdGD: Tensor, num_strides: int) -> Tensor:
        """One key for every block of `num_strides` strides: [C, G, D]."""
        return _mean_of_strides(strides_CdGD, num_strides).to(strides_CdGD.dtype)


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

    def of_strides(self, strides_CdGD: Tensor, num_strides: int) -> Tensor:
        """One key for every block of `num_strides` strides: [C, G, D]."""
        flat_GCX = strides_CdGD.permute(2, 0, 1, 3).flatten(2)
        weight_GYX = _stacked(self.weight, num_strides)
        product_CGY = torch.bmm(flat_GCX, weight_GYX.mT.to(flat_GCX.dtype)).transpose(0, 1)
        return join_strides(torch.split(product_CGY, self.width, dim=-1)).to(strides_CdGD.dtype)


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

    def of_strides(self, strides_CdGD: Tensor, num_strides: int) -> Tensor:
        """One key for every block of `num_strides` strides: [C, G, D].

        What the position encoding gives to the hidden layer is the same for every block.
        """
        weight, position = widen(self.up.weight), widen(self.position_LD)
        offset_Y = (weight * position.flatten()).sum(dim=-1)
        flat_CGX = strides_CdGD.transpose(1, 2).flatten(2)
        product_CGY = F.linear(flat_CGX, _stacked(self.up.weight, num_strides))
        parts = torch.split(product_CGY, self.up.out_features, dim=-1)
        hidden_CGY = F.silu(join_strides(parts) + offset_Y).to(flat_CGX.dtype)
        residual_CGD = self.down(hidden_CGY)
        pooled_CGD: Tensor = _mean_of_strides(strides_CdGD, num_strides) + residual_CGD
        return pooled_CGD.to(strides_CdGD.dtype)


def _stacked(weight: Tensor, num_strides: int) -> Tensor:
    """A matrix [..., Y, L * D] over a block as those [..., num_strides * Y, d * D] over strides."""
    parts = weight.reshape(*weight.shape[:-1], num_strides, -1)
    return parts.transpose(-2, -3).flatten(-3, -2)


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
