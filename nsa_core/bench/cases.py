"""What the kernel bench runs: shapes, inputs, whole NSA, its branches, and the dense controls.

Legend: B documents of T tokens, N = B * T, H heads, G groups, D width, C compressed slots.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core.config.model import NSAConfig
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing, compressed_slots
from nsa_core.kernels.triton.triton_backend import TritonBackend
from nsa_core.model.compression import MeanCompression, cut_strides

#: The paper's sizes (section 4.1), which are the defaults.
NSA_SIZES = NSAConfig()
GEOMETRY = BlockGeometry.from_config(NSA_SIZES)


@dataclass(frozen=True)
class Shape:
    """Heads, groups and head width of an attention layer."""

    name: str
    num_heads: int
    num_groups: int
    width: int


SHAPES = {"A": Shape("A", 12, 2, 64), "B": Shape("B", 64, 4, 128)}
DENSE_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


@dataclass(frozen=True)
class Case:
    """One timed function: its forward, the leaves it differentiates, and an output gradient."""

    name: str
    forward: Callable[[], Tensor]
    inputs: list[Tensor]
    grad: Tensor


def random_tensors(shape: Shape, num_tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Normal q, three pairs k, v, gate logits and an output gradient, as leaves on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def leaf(*size: int) -> Tensor:
        value = torch.randn(*size, device="cuda", dtype=dtype, generator=generator)
        return value.requires_grad_()

    heads, groups, width = shape.num_heads, shape.num_groups, shape.width
    tensors = {"q": leaf(num_tokens, heads, width), "gate": leaf(num_tokens, heads, 3)}
    for branch in ("cmp", "slc", "win"):
        for kind in ("k", "v"):
            tensors[f"{kind}_{branch}"] = leaf(num_tokens, groups, width)
    tensors["grad"] = leaf(num_tokens, heads, width).detach()
    return tensors


def nsa_cases(shape: Shape, length: int, num_tokens: int, dtype: torch.dtype) -> list[Case]:
    """Whole NSA (phi, three branches, choice, gates) and each branch alone.

    What surrounds the operator, phi as the mean and the gates' sigmoid, is compiled, as runs do.
    """
    t = random_tensors(shape, num_tokens, dtype)
    packing = Packing.uniform(num_tokens // length, length, "cuda")
    backend = TritonBackend()
    slots = compressed_slots(packing, GEOMETRY)

    def mean(x_NGD: Tensor) -> Tensor:
        strides_CdGD = cut_strides(x_NGD, GEOMETRY, packing, slots)
        num_strides = GEOMETRY.compress_block // GEOMETRY.compress_stride
        return MeanCompression().of_strides(strides_CdGD, num_strides)

    @torch.compile(fullgraph=True)
    def surround(k_NGD: Tensor, v_NGE: Tensor, gate_NH3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return mean(k_NGD), mean(v_NGE), torch.sigmoid(gate_NH3)

    def whole() -> Tensor:
        k_CGD, v_CGE, gate_NH3 = surround(t["k_cmp"], t["v_cmp"], t["gate"])
        out, _ = backend.attend(
            t["q"], (k_CGD, v_CGE), (t["k_slc"], t["v_slc"]), (t["k_win"], t["v_win"]),
            gate_NH3, GEOMETRY, packing,
        )  # fmt: skip
        return out

    k_pooled, v_pooled = (mean(t[name]).detach().requires_grad_() for name in ("k_cmp", "v_cmp"))
    with torch.no_grad():
        _, lse = backend.compressed(t["q"], k_pooled, v_pooled, GEOMETRY, packing)
        ids = backend.select(t["q"], k_pooled, lse, GEOMETRY, packing)

    def compressed() -> Tensor:
        return backend.compressed(t["q"], k_pooled, v_pooled, GEOMETRY, packing)[0]

    def selected() -> Tensor:
        return backend.selected(t["q"], t["k_slc"], t["v_slc"], ids, GEOMETRY, packing)

    def sliding() -> Tensor:
        return backend.sliding(t["q"], t["k_win"], t["v_win"], GEOMETRY, packing)

    leaves = [tensor for name, tensor in t.items() if name != "grad"]
    return [
        Case("nsa", whole, leaves, t["grad"]),
        Case("compressed", compressed, [t["q"], k_pooled, v_pooled], t["grad"]),
        Case("selected", selected, [t["q"], t["k_slc"], t["v_slc"]], t["grad"]),
        Case("sliding", sliding, [t["q"], t["k_win"], t["v_win"]], t["grad"]),
    ]


def dense_case(name: str, shape: Shape, length: int, num_tokens: int, dtype: torch.dtype) -> Case:
    """Dense causal attention of the same heads through one SDPA backend of torch."""
    batch = num_tokens // length
    generator = torch.Generator("cuda").manual_seed(0)

    def leaf(heads: int) -> Tensor:
        size = (batch, length, heads, shape.width)
        value = torch.randn(size, device="cuda", dtype=dtype, generator=generator)
        return value.transpose(1, 2).requires_grad_()

    q, k, v = leaf(shape.num_heads), leaf(shape.num_groups), leaf(shape.num_groups)

    def forward() -> Tensor:
        with sdpa_kernel([DENSE_BACKENDS[name]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Case(f"dense_{name}", forward, [q, k, v], leaf(shape.num_heads).detach())
