"""Products of 8-bit numbers: rounding against float64, gradients, causality, what is not hidden."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsa_core.model.fp8 import (
    E4M3,
    E5M2,
    fp8_mlp,
    multiply,
    multiply_gradients,
    power_of_two,
    quantise_rows,
)
from nsa_core.model.loss import loss_sum
from nsa_core.model.transformer import LanguageModel
from tests.core.model.cases import small_config, tokens

#: Half a unit in the last place of a normal number; half the smallest number over the smallest of
#: the largest numbers that a scaled row can have (2^7 and 2^14).
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}
OF_THE_LARGEST = {E4M3: 2.0**-10 / 2**7, E5M2: 2.0**-17 / 2**14}
#: A bfloat16 result is within this of the sum that it is rounded from.
BF16 = 2.0**-8


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, also from row to row and from column to column."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*of: int) -> Tensor:
        return torch.randn(of, generator=generator)

    return drawn(*shape) * (2 * drawn(*shape) + 3 * drawn(shape[0], 1) + drawn(1, shape[1])).exp()


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Most that rounding its rows to 8 bits may change each number of x."""
    x = x.double().abs()
    return torch.maximum(RELATIVE[dtype] * x, OF_THE_LARGEST[dtype] * x.amax(-1, keepdim=True))


def of_product(a: Tensor, a_error: Tensor, b: Tensor, b_error: Tensor) -> Tensor:
    """Most that errors of both factors, sums in float32 and the bfloat16 result change a @ b."""
    a, b = a.double().abs(), b.double().abs()
    size = (a + a_error) @ (b + b_error)
    return size - a @ b + (BF16 + a.shape[1] * 2.0**-23) * size


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_number_is_rounded_by_no_more_than_its_bits_allow(dtype: torch.dtype) -> None:
    x = torch.cat([wide(40, 96), torch.zeros(1, 96), torch.full((1, 96), 2.0**-15)])
    numbers, exponent = quantise_rows([x], dtype)
    found = numbers.double() * power_of_two(exponent).double()
    assert numbers.dtype == dtype
    assert ((found - x).abs() <= rounding(x, dtype)).all()
    largest = numbers[:40].float().abs().amax(-1).log2()
    top = {E4M3: 7, E5M2: 14}[dtype]
    assert ((top <= largest) & (largest <= top + 1)).all()


def product_and_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """By 8-bit numbers; the gradient comes in two pieces."""
    rows = [quantise_rows([matrix], E4M3) for matrix in (x, weight)]
    return multiply(*rows, is_fast=True), *multiply_gradients(grad.chunk(2, 1), *rows)


def limits(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Most that the product and both gradients may be off, from float64 inputs."""
    x_error, weight_error = rounding(x, E4M3), rounding(weight, E4M3)
    # the gradient is rounded after each column was multiplied by the scale of a row of the weight
    scale_O = quantise_rows([weight], E4M3)[1].double().exp2().T
    error = rounding(grad * scale_O, E5M2) / scale_O
    # and once more after each row was multiplied by the scale of a token over the largest of them
    x_exponent = quantise_rows([x], E4M3)[1].double()
    most = (quantise_rows([grad * scale_O], E5M2)[1] + x_exponent).max()
    again = error + 2.0**-17 * (most - x_exponent).exp2() / scale_O
    return (
        of_product(x, x_error, weight.T, weight_error.T),
        of_product(grad, error, weight, weight_error),
        of_product(grad.T, again.T, x, x_error),
    )


def test_the_product_and_both_gradients_are_within_their_bounds_of_float64() -> None:
    x, weight, grad = wide(64, 32), wide(48, 32, seed=1), wide(64, 48, seed=2).bfloat16()
    found = product_and_gradients(x, weight, grad)
    x, weight, grad = (matrix.double() for matrix in (x, weight, grad))
    expected = (x @ weight.T, grad @ weight, grad.T @ x)
    for one, other, limit in zip(found, expected, limits(x, weight, grad), strict=True):
        assert ((one.double() - other).abs() <= limit).all()


def test_what_eight_bits_hold_is_multiplied_without_an_error_forward_and_backward() -> None:
    """Rows of zeros in the weight have gradients too, which e4m3 would not hold beside others."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> Tensor:
        signs = torch.randint(-1, 2, (rows, columns), generator=generator)
        return signs * torch.randint(0, 3, (rows, columns), generator=generator).float().exp2()

    x, weight, grad = drawn(32, 16), drawn(48, 16), drawn(32, 48)
    weight[24:32] = 0
    found = product_and_gradients(x, weight, grad)
    for one, other in zip(found, (x @ weight.T, grad @ weight, grad.T @ x), strict=True):
        assert torch.equal(one, other.bfloat16())


def matrices(activation: str = "swiglu") -> tuple[Tensor, ...]:
    """Input [64, 32], both weights for a hidden width of 48, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    columns = 96 if activation == "swiglu" else 48

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return drawn(64, 32), drawn(columns, 32) / 4, drawn(32, 48) / 4, drawn(64, 32).bfloat16()


def plain_mlp(x: Tensor, up: Tensor, down: Tensor, *, is_gated: bool) -> Tensor:
    inner = x @ up.T
    gate, value = inner.chunk(2, dim=-1) if is_gated else (inner, 1.0)
    return (F.silu(gate) * value) @ down.T


def run_mlp(mlp, matrices: Sequence[Tensor], *, is_gated: bool = True) -> list[Tensor]:
    """The output and the gradients of the input and of both weights."""
    *inputs, grad = matrices
    leaves = [matrix.detach().requires_grad_() for matrix in inputs]
    out = mlp(*leaves, is_gated=is_gated)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_an_mlp_is_that_of_float64_but_for_the_rounding(activation: str) -> None:
    """Errors of single numbers, 4 and 7 % on average, hardly add up: their signs are random."""
    is_gated, inputs = activation == "swiglu", matrices(activation)
    found = run_mlp(fp8_mlp, inputs, is_gated=is_gated)
    expected = run_mlp(plain_mlp, [matrix.double() for matrix in inputs], is_gated=is_gated)
    for one, other in zip(found, expected, strict=True):
        assert 0 < (one - other).norm() < 0.1 * other.norm()
    assert [one.dtype for one in found] == [torch.bfloat16, *[torch.float32] * 3]


def test_no_token_changes_the_output_of_another() -> None:
    x, up, down, _ = matrices()
    changed = torch.cat([x[:5], 1e6 * x[5:].flip(0)])
    outs = [fp8_mlp(one, up, down, is_gated=True) for one in (x, changed)]
    assert torch.equal(outs[0][:5], outs[1][:5])


def test_only_sums_over_the_width_of_a_model_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper keeps 14 bits of a fast sum; other processors have no such sums."""
    fast, product = [], torch._scaled_mm

    def recorded(*factors: Tensor, use_fast_accum: bool, **options) -> Tensor:
        fast.append(use_fast_accum)
        return product(*factors, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    run_mlp(fp8_mlp, matrices())
    assert fast == [True, True, False, False, False, False]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_finite_shows_in_the_output_and_in_every_gradient(bad: float) -> None:
    x, up, down, grad = matrices()
    broken, broken_grad = x.clone(), grad.clone()
    broken[3, 2] = broken_grad[3, 2] = bad
    out, _, *of_weights = run_mlp(fp8_mlp, (broken, up, down, grad))
    assert not out[3].isfinite().any() and out[:3].isfinite().all() and out[4:].isfinite().all()
    assert not any(one.isfinite().any() for one in of_weights)
    _, of_input, *of_weights = run_mlp(fp8_mlp, (x, up, down, broken_grad))
    assert not of_input[3].isfinite().any() and of_input[4:].isfinite().all()
    assert not any(one.isfinite().all() for one in of_weights)


SIZES = {"dim": 32, "mlp_width": 48, "vocab_size": 64}


def sized(attention: str = "nsa", seed: int = 0) -> LanguageModel:
    return LanguageModel(small_config(attention=attention, **SIZES), seed=seed)


def trained(model: LanguageModel, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss a token and gradients of one pass under bf16."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        result = model.loss(ids, ids.roll(-1, 1))
    loss = result.sum / result.count
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("products", ["mlp", "mlp_head"])
def test_a_model_has_nearly_the_loss_and_the_gradients_of_bf16(attention, products) -> None:
    """Each product has errors of a few percent; a gradient that lacks a part is off by far more."""
    model, ids = sized(attention), tokens(2, 48, vocab_size=64)
    loss, grads = trained(model, ids)
    model.use_fp8(products)
    found, rounded = trained(model, ids)
    assert found == pytest.approx(loss, rel=1e-2)
    assert found != loss
    for name, grad in grads.items():
        assert 0 < (rounded[name] - grad).norm() < 0.25 * grad.norm(), name


@pytest.mark.parametrize("products", ["none", "mlp", "mlp_head"])
def test_only_passes_with_gradients_are_rounded(products: str) -> None:
    model, ids = sized(), tokens(2, 48, vocab_size=64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = [model(ids), model.loss(ids, ids).sum]
        model.use_fp8(products)
        found = [model(ids), model.loss(ids, ids).sum]
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    paths = {"none": {}, "mlp": {"mlp": "fp8"}, "mlp_head": {"mlp": "fp8", "logits": "fp8"}}
    assert {k: v for k, v in model.kernel_paths.items() if v == "fp8"} == paths[products]


def test_logits_of_eight_bit_numbers_are_within_their_bound_and_their_gradients_in_bf16() -> None:
    hidden, weight = wide(32, 16).tanh().bfloat16(), wide(48, 16, seed=1).tanh().bfloat16()
    target = torch.arange(32) % 48
    target[5] = -1
    leaves = [x.float().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        total = loss_sum(*leaves, target, in_fp8=True).sum
    hidden, weight = hidden.double(), weight.double()
    logits = hidden @ weight.T
    limit = of_product(hidden, rounding(hidden, E4M3), weight.T, rounding(weight, E4M3).T)
    # a loss moves by at most twice the largest error of a logit
    assert abs(total.item() - nats(logits, target)) <= 2 * limit.amax(-1).sum()
    rows = [quantise_rows([matrix], E4M3) for matrix in (hidden, weight)]
    probability = multiply(*rows).double().softmax(-1)
    one_hot = F.one_hot(target.clamp(min=0), 48)
    slope = (probability - one_hot) * (target >= 0)[:, None]
    grad_hidden, grad_weight = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(grad_hidden.double(), slope @ weight, rtol=0.02, atol=0.02)
    torch.testing.assert_close(grad_weight.double(), slope.T @ hidden, rtol=0.02, atol=0.02)


def nats(logits: Tensor, target: Tensor) -> float:
    return F.cross_entropy(logits, target, ignore_index=-1, reduction="sum").item()


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_a_compiler_follows_the_products_to_their_end() -> None:
    """No code is generated: the operators run as they were traced."""
    torch._dynamo.reset()
    inputs = matrices()
    with torch.autocast("cpu", torch.bfloat16):
        traced = run_mlp(torch.compile(fp8_mlp, backend="eager", fullgraph=True), inputs)
        assert all(map(torch.equal, traced, run_mlp(fp8_mlp, inputs)))
    torch._dynamo.reset()
