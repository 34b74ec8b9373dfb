"""Norm and MLP beside their definitions."""

import pytest
import torch
from torch.nn import functional as F

from nsa_core.config.model import GateConfig
from nsa_core.model.layers import MLP, BranchGate, RMSNorm
from tests.core.model.cases import small_config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(96, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(0.5 + torch.rand(96, generator=generator))
    x = (300 * torch.randn(40, 96, generator=generator)).to(dtype)  # squares beyond float16
    found, exact = norm(x), x.double()
    truth = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert found.dtype == dtype
    info = torch.finfo(dtype)
    torch.testing.assert_close(
        found.double(), truth, rtol=1.001 * info.eps / 2, atol=info.smallest_normal * info.eps
    )


def test_the_first_half_of_a_swiglu_gates_the_second() -> None:
    """silu(gate) * value: up gives the gate (1, 2), then the value (3, -1)."""
    mlp = MLP(small_config(dim=2, mlp_width=2, activation="swiglu"))
    with torch.no_grad():
        mlp.up.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, -0.5]]))
        mlp.down.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 10.0]]))
    silu_1, silu_2 = F.silu(torch.tensor([1.0, 2.0])).tolist()
    expected = torch.tensor([3 * silu_1, 3 * silu_1 - 10 * silu_2])
    torch.testing.assert_close(mlp(torch.tensor([1.0, 2.0])), expected)


def test_a_plain_mlp_has_silu_between_its_matrices() -> None:
    mlp = MLP(small_config(dim=2, mlp_width=2, activation="silu"))
    with torch.no_grad():
        mlp.up.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
        mlp.down.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    silu_3, silu_minus_2 = F.silu(torch.tensor([3.0, -2.0])).tolist()
    expected = torch.tensor([2 * silu_3, silu_3 + silu_minus_2])
    torch.testing.assert_close(mlp(torch.tensor([1.0, 2.0])), expected)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_of_half_logits_are_float32(dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gate = BranchGate(GateConfig(kind=kind), dim=8, num_heads=2, num_groups=1)
    with torch.no_grad():
        gate.logits.bias.copy_(torch.randn(6, generator=generator))
    product = torch.randn(50, 6, generator=generator).to(dtype)
    found = gate(torch.empty(50, 8), product)
    logits = (product.double() + gate.logits.bias.double()).view(50, 2, 3)
    exact = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
