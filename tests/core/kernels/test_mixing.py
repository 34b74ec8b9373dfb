"""The gated sum in half precision."""

import pytest
import torch

from nsa_core.kernels.mixing import gated_sum


@pytest.mark.parametrize("gate_dtype", [torch.float32, None], ids=["float32 gates", "half gates"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gated_sum_is_a_float32_sum_rounded_once(dtype, gate_dtype):
    generator = torch.Generator().manual_seed(0)
    gates = torch.rand(50, 4, 3, generator=generator).to(gate_dtype or dtype)
    outs = [torch.randn(50, 4, 5, generator=generator).to(dtype) for _ in range(3)]
    first, second, third = (gates[..., i, None].float() * out.float() for i, out in enumerate(outs))
    found = gated_sum(gates, tuple(outs))
    assert found.dtype == dtype
    assert torch.equal(found, (first + second + third).to(dtype))
