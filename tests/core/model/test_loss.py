"""The chunked cross-entropy by itself: its dtypes, the gradients it makes, what it refuses."""

import pytest
import torch
from torch.nn import functional as F

from nsa_core.model import loss as loss_module
from nsa_core.model.loss import loss_sum

TARGET = torch.tensor([0, 4, -1, 2, 3, 1, -1])


def matrices(dtype: torch.dtype = torch.float64):
    """Hidden states [7, 6] and a head [5, 6]; neither asks for a gradient."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 6, generator=generator, dtype=dtype) for rows in (7, 5)]


def plain_loss(hidden, weight):
    return F.cross_entropy(hidden @ weight.T, TARGET, ignore_index=-1, reduction="sum")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch):
    """Arguments of every call of the operator."""
    calls, operator = [], loss_module._cross_entropy

    def recorder(*arguments):
        calls.append(arguments)
        return operator(*arguments)

    monkeypatch.setattr(loss_module, "_cross_entropy", recorder)
    return calls


@pytest.mark.parametrize("trained", [[0], [1], [0, 1]], ids=["hidden", "head", "both"])
def test_whatever_is_trained_gets_the_gradient_of_plain_cross_entropy(trained: list[int]) -> None:
    inputs = matrices()
    leaves = [inputs[i].requires_grad_() for i in trained]
    found, expected = loss_sum(*inputs, TARGET).sum, plain_loss(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)
    )


def test_both_matrices_meet_in_the_dtype_of_autocast(recorded) -> None:
    hidden, weight = (x.requires_grad_() for x in matrices(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_sum(hidden, weight, TARGET).sum
    assert [x.dtype for x in recorded[0][:2]] == [torch.bfloat16, torch.bfloat16]
    assert found.dtype == torch.float32
    assert [x.dtype for x in torch.autograd.grad(found, [hidden, weight])] == [torch.float32] * 2


def test_gradients_are_made_only_where_one_is_wanted(recorded) -> None:
    hidden, weight = (x.requires_grad_() for x in matrices())
    loss_sum(hidden, weight, TARGET)
    with torch.no_grad():
        loss_sum(hidden, weight, TARGET)
    loss_sum(hidden.detach(), weight.detach(), TARGET)
    assert [needs_grad for *_, needs_grad, _ in recorded] == [True, False, False]


def test_the_scale_of_the_loss_is_applied_in_float32() -> None:
    """The gradient of the hidden states is made in bfloat16; a third of it is not rounded again."""
    hidden, weight = (x.requires_grad_() for x in matrices(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        total = loss_sum(hidden, weight, TARGET).sum
    (whole,) = torch.autograd.grad(total, hidden, retain_graph=True)
    (third,) = torch.autograd.grad(total * (1 / 3), hidden)
    torch.testing.assert_close(third.double(), whole.double() / 3, rtol=2e-7, atol=0)


@pytest.mark.parametrize("of", [lambda total: total, torch.square], ids=["sum", "its square"])
def test_a_second_derivative_is_refused(of) -> None:
    """The gradients are made with the loss, as numbers: a penalty on them would be half wrong."""
    hidden, weight = matrices()
    x = hidden.requires_grad_()
    total = of(loss_sum(x.square(), weight, TARGET).sum)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(total, x, create_graph=True)


@pytest.mark.parametrize("chunk_rows", [1, 64])
def test_half_logits_of_a_large_vocabulary_lose_nothing_in_the_loss(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax, logarithm and sum are float32: in bfloat16 they are 0.01 nats a token off."""
    vocabulary, num_tokens = 50_304, 24
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", chunk_rows * vocabulary)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 16, generator=generator) / 2 for rows in (num_tokens, vocabulary)
    )
    target = torch.randint(vocabulary, (num_tokens,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_sum(hidden, weight, target)
    logits = (hidden.bfloat16() @ weight.bfloat16().T).double()
    exact = F.cross_entropy(logits, target, reduction="sum")
    assert found.sum.dtype == found.count.dtype == torch.float32
    # float32 at 270 nats: 24 roundings of 2^-24 each are 1.6e-5 a token at most.
    assert abs(found.sum.item() - exact.item()) / num_tokens <= 2e-5


def test_half_logits_of_a_large_vocabulary_have_gradients_rounded_once() -> None:
    vocabulary, num_tokens = 50_304, 6
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        (torch.randn(rows, 16, generator=generator) / 2).bfloat16()
        for rows in (num_tokens, vocabulary)
    )
    target = torch.randint(vocabulary, (num_tokens,), generator=generator)
    logits = (hidden @ weight.T).double().requires_grad_()
    F.cross_entropy(logits, target, reduction="sum").backward()
    grad = loss_module._chunk(logits.detach().bfloat16(), target, needs_grad=True)[1]
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        grad.double(), logits.grad, rtol=1.01 * torch.finfo(torch.bfloat16).eps / 2, atol=1e-9
    )


@pytest.mark.parametrize("target", [-2, 5])
def test_a_target_outside_the_vocabulary_is_refused_on_a_processor(target: int) -> None:
    with pytest.raises(RuntimeError, match=f"index {target} is out of bounds"):
        loss_sum(*matrices(), torch.full((7,), target))
