"""Products of 8-bit numbers on a card: rounding, gradients, causality, compilation."""

import pytest
import torch
from torch import Tensor

from nsa_core.checks.causality import perturbation_probe
from nsa_core.config.model import ModelConfig, NSAConfig
from nsa_core.config.run import FP8_CAPABILITY
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.triton.triton_backend import TritonBackend
from nsa_core.model.fp8 import E4M3, E5M2, fp8_mlp, multiply, quantise_rows
from nsa_core.model.transformer import LanguageModel
from tests.core.model.test_fp8 import limits, matrices, product_and_gradients, run_mlp, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY,
        reason="this card has no 8-bit products",
    ),
]

MODEL = ModelConfig(
    vocab_size=512,
    dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_groups=2,
    head_dim_k=32,
    head_dim_v=32,
    mlp_width=256,
    nsa=NSAConfig(num_selected=4, window=48),
)
#: Hopper's fast sums keep 13 bits behind the point of the largest partial sum (DeepSeek-V3, arXiv
#: 2412.19437, section 3.5.2), one rounding for 32 products.
FAST_SUM = 2.0**-12


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_card_rounds_as_a_processor_does(dtype, is_compiled):
    torch.compiler.reset()
    rounded = torch.compile(quantise_rows, fullgraph=True) if is_compiled else quantise_rows
    x = torch.cat([wide(200, 768), torch.zeros(1, 768), torch.full((1, 768), 2.0**-85)])
    found, expected = rounded([x.cuda()], dtype), quantise_rows([x], dtype)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu().float(), other.float())


@pytest.mark.parametrize(("rows", "inner", "outer"), [(64, 32, 64), (4096, 768, 4096)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_product_and_both_gradients_are_within_their_bounds_of_float64(
    rows, inner, outer, is_compiled
):
    torch.compiler.reset()
    call = product_and_gradients
    if is_compiled:
        call = torch.compile(call, fullgraph=True)
    x, weight = wide(rows, inner).cuda(), wide(outer, inner, seed=1).cuda()
    grad = wide(rows, outer, seed=2).cuda().bfloat16()
    found = call(x, weight, grad)
    x, weight, grad = (matrix.double() for matrix in (x, weight, grad))
    forward, *backward = limits(x, weight, grad)
    forward += (inner / 32) * FAST_SUM * 1.2 * x.abs() @ weight.abs().T
    expected = (x @ weight.T, grad @ weight, grad.T @ x)
    for one, other, limit in zip(found, expected, (forward, *backward), strict=True):
        assert ((one.double() - other).abs() <= limit).all()


@pytest.mark.parametrize("tokens", [4096, 65_536])
def test_a_sum_over_all_tokens_is_not_a_fast_one(tokens):
    """Of ones beside one large number: sums of 14 bits lose ones, those of float32 lose none."""
    left = torch.ones(16, tokens, device="cuda")
    left[:, 0] = 448.0
    right = torch.ones(16, tokens, device="cuda")
    zeros = torch.zeros(16, 1, dtype=torch.int32, device="cuda")
    found = multiply((left.to(E5M2), zeros), (right.to(E4M3), zeros))
    expected = left.to(E5M2).double() @ right.double().T
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_not_finite_shows_in_the_output_and_in_every_gradient(bad, is_compiled):
    torch.compiler.reset()
    mlp = torch.compile(fp8_mlp, fullgraph=True) if is_compiled else fp8_mlp
    x, up, down, grad = (one.cuda() for one in matrices())
    broken, broken_grad = x.clone(), grad.clone()
    broken[3, 2] = broken_grad[3, 2] = bad
    out, _, *of_weights = run_mlp(mlp, (broken, up, down, grad))
    assert not out[3].isfinite().any() and out[4:].isfinite().all()
    assert not any(one.isfinite().all() for one in of_weights)
    _, of_input, *of_weights = run_mlp(mlp, (x, up, down, broken_grad))
    assert not of_input[3].isfinite().any()
    assert not any(one.isfinite().all() for one in of_weights)


def step(model: LanguageModel, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss a token and gradients of one pass."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        result = model.loss(ids, ids.roll(-1, 1))
    loss = result.sum / result.count
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), grads


def made(attention: str, loss_kernel: str = "triton") -> LanguageModel:
    config = MODEL.model_copy(update={"attention": attention})
    model = LanguageModel(config, BranchBackends.of(TritonBackend()), seed=1).cuda()
    model.loss_kernel = loss_kernel
    return model


IDS = torch.randint(512, (4, 512), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("products", ["mlp", "mlp_head"])
def test_compiled_blocks_have_the_gradients_of_eager_ones_and_nearly_those_of_bf16(
    attention, products
):
    torch.compiler.reset()
    ids, model = IDS.cuda(), made(attention)
    loss, grads = step(model, ids)
    model.use_fp8(products)
    eager_loss, eager = step(model, ids)
    for block in model.blocks:
        block.compile(fullgraph=True)
    compiled_loss, compiled = step(model, ids)
    assert eager_loss == pytest.approx(loss, rel=1e-2)
    assert compiled_loss == pytest.approx(eager_loss, rel=2e-3)
    for name, grad in grads.items():
        assert 0 < (eager[name] - grad).norm() < 0.25 * grad.norm(), name
        assert (compiled[name] - eager[name]).norm() < 0.1 * grad.norm(), name


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_the_future_changes_no_bit_of_the_past(attention):
    model = made(attention)
    model.use_fp8("mlp")

    def forward(tokens_BT, packing):
        with torch.enable_grad(), torch.autocast("cuda", torch.bfloat16):
            return model(tokens_BT, packing).detach()

    found = perturbation_probe(forward, vocab_size=512, lengths=(48, 336, 704), device="cuda")
    assert found.leaks == ()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_card():
    model, ids = made("nsa"), IDS.cuda()
    model.use_fp8("mlp_head")
    step(model, ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            result = model.loss(ids, ids)
        (result.sum / result.count).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.sum.isfinite().item()


@pytest.mark.parametrize("loss_kernel", ["torch", "triton"])
def test_a_step_repeats_to_the_bit(loss_kernel):
    model, ids = made("dense", loss_kernel), IDS.cuda()
    model.use_fp8("mlp_head")
    (first, grads), (second, again) = step(model, ids), step(model, ids)
    assert first == second
    for name in ("blocks.0.mlp.up.weight", "blocks.1.mlp.down.weight"):
        assert torch.equal(grads[name], again[name])
