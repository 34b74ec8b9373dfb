"""Inputs that the kernel tests share: awkward lengths, odd widths, several geometries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.kernels.backend import AttentionBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing, compressed_slots

#: Three blocks are forced: with more than three, the rest is chosen freely in long documents.
GEOMETRIES = {
    "paper-ratios": BlockGeometry(8, 4, 16, 4, 13),
    "no-overlap": BlockGeometry(4, 4, 8, 4, 3),
    "stride-1": BlockGeometry(2, 1, 3, 6, 64),
    "l-equals-l'": BlockGeometry(8, 2, 8, 5, 1),
    "forced-only": BlockGeometry(4, 2, 4, 3, 6),
}
#: Lengths of the documents of one row: below l, not multiples of d, l, l' or w, and long.
DOCUMENTS = {
    "one": [109],
    "several": [3, 29, 1, 94, 8],
    "tiny": [1],
    "below-l": [2, 1],
}


@dataclass
class Inputs:
    """Everything a backend takes; each branch has its own keys and values."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor

    def all(self) -> list[Tensor]:
        return list(vars(self).values())


def make_inputs(
    packing: Packing,
    geometry: BlockGeometry,
    *,
    dtype: torch.dtype = torch.float64,
    heads: int = 4,
    groups: int = 2,
    seed: int = 0,
) -> Inputs:
    """Normal inputs that require gradients; unused compressed slots hold large garbage."""
    generator = torch.Generator().manual_seed(seed)
    rows, slots = packing.num_tokens, geometry.num_slots(packing.num_tokens)
    shapes = [(rows, heads, 6)] + [
        (count, groups, width) for count in (slots, rows, rows) for width in (6, 5)
    ]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    is_unused = ~compressed_slots(packing, geometry).exists_C
    for tensor in tensors[1:3]:
        tensor[is_unused] = 1e3
    return Inputs(*(tensor.requires_grad_() for tensor in tensors))


@dataclass
class Outputs:
    """The results of all branches."""

    compressed: Tensor
    lse: Tensor
    ids: Tensor
    selected: Tensor
    sliding: Tensor

    def branches(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.compressed, self.selected, self.sliding


def run(
    backend: AttentionBackend,
    inputs: Inputs,
    geometry: BlockGeometry,
    packing: Packing,
    ids: Tensor | None = None,
) -> Outputs:
    """All branches; the selected one on its own choice unless ids are given."""
    compressed, lse = backend.compressed(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry, packing)
    if ids is None:
        ids = backend.select(inputs.q, inputs.k_cmp, lse, geometry, packing)
    selected = backend.selected(inputs.q, inputs.k_slc, inputs.v_slc, ids, geometry, packing)
    sliding = backend.sliding(inputs.q, inputs.k_win, inputs.v_win, geometry, packing)
    return Outputs(compressed, lse, ids, selected, sliding)


def gradients(outputs: Outputs, inputs: Inputs, seed: int = 1) -> list[Tensor]:
    """Gradients of a random projection of all branches; zeros where a tensor is empty."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(
        (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
        for out in outputs.branches()
    )
    grads = torch.autograd.grad(total, inputs.all(), allow_unused=True)
    return [
        torch.zeros_like(tensor) if grad is None else grad
        for grad, tensor in zip(grads, inputs.all(), strict=True)
    ]
