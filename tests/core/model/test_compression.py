"""phi over the strides of many blocks beside phi of each block by itself."""

import pytest
import torch
from torch import Tensor

from nsa_core.model.compression import make_compression

SLOTS, STRIDE, GROUPS, WIDTH = 11, 4, 2, 6


def phi_and_strides(kind: str, num_strides: int, dtype: torch.dtype):
    """Phi with weights far from its start, and strides [C, d, G, D]."""
    generator = torch.Generator().manual_seed(num_strides)
    phi = make_compression(
        kind, num_groups=GROUPS, block=num_strides * STRIDE, width=WIDTH, hidden=5
    )
    with torch.no_grad():
        for parameter in phi.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    strides = torch.randn(SLOTS, STRIDE, GROUPS, WIDTH, generator=generator, dtype=torch.float64)
    return phi.double(), strides.to(dtype).requires_grad_()


def blocks_of(strides_CdGD: Tensor, num_strides: int) -> Tensor:
    """Every whole block [C - num_strides + 1, L, G, D], its tokens copied out."""
    whole = len(strides_CdGD) - num_strides + 1
    return torch.cat([strides_CdGD[by : by + whole] for by in range(num_strides)], dim=1)


@pytest.mark.parametrize("num_strides", [1, 2, 4])
@pytest.mark.parametrize("kind", ["avg", "linear", "mlp"])
def test_strides_give_what_their_blocks_give_with_the_same_gradients(
    kind: str, num_strides: int
) -> None:
    phi, strides = phi_and_strides(kind, num_strides, torch.float64)
    leaves = [strides, *phi.parameters()]
    found = phi.of_strides(strides, num_strides)
    expected = phi(blocks_of(strides, num_strides))
    whole = found[: len(expected)]
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    grads, truths = (torch.autograd.grad((out * weight).sum(), leaves) for out in (whole, expected))
    for grad, truth in zip(grads, truths, strict=True):
        assert truth.abs().max() > 0
        torch.testing.assert_close(grad, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["avg", "linear", "mlp"])
def test_behind_the_last_stride_there_are_zeros(kind: str) -> None:
    phi, strides = phi_and_strides(kind, 3, torch.float64)
    followed = torch.cat([strides, torch.zeros_like(strides[:2])])
    found, expected = phi.of_strides(strides, 3), phi(blocks_of(followed, 3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["avg", "linear", "mlp"])
@pytest.mark.parametrize("slots", [0, 1])
def test_fewer_strides_than_a_block_are_no_error(kind: str, slots: int) -> None:
    phi, strides = phi_and_strides(kind, 4, torch.float64)
    found = phi.of_strides(strides[:slots], 4)
    assert found.shape == (slots, GROUPS, WIDTH)
    grads = torch.autograd.grad(found.sum(), [strides, *phi.parameters()])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", ["avg", "linear", "mlp"])
def test_strides_in_half_precision_are_no_worse_than_blocks(kind: str) -> None:
    """The partial products are rounded once more, the encoded tokens no longer."""
    phi, strides = phi_and_strides(kind, 2, torch.bfloat16)
    exact = phi(blocks_of(strides.double(), 2)).detach()
    with torch.autocast("cpu", torch.bfloat16):
        low = phi.float()
        found = low.of_strides(strides, 2)[: len(exact)]
        blocks = low(blocks_of(strides, 2))
    errors = [(out.detach() - exact).norm() / exact.norm() for out in (found, blocks)]
    assert found.dtype == torch.bfloat16
    assert errors[0] <= 1.25 * errors[1] + 1e-4, errors
