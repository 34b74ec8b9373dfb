"""Hopper's backward of items on a card, beside the Triton kernel of any card and float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton import attend_host, ops, selected
from nsa_core.kernels.triton.hopper import support
from tests import oracle
from tests.gpu.test_hopper_kernels import only_on_hopper
from tests.gpu.test_triton_backend import errors, leaves, poison

pytestmark = pytest.mark.gpu
#: Fixtures of every test here: it needs Hopper, and finds NaN in fresh memory.
__all__ = ["only_on_hopper", "poison"]

TOLERANCE = 1e-2
BLOCK, WIDTH = 64, 64


@dataclass(frozen=True)
class Choice:
    """Inputs of the selected branch on the KV-major path."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    ids: Tensor
    borders: tuple[int, ...]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor(self.borders, dtype=torch.int32, device="cuda")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False) -> Tensor:
        longest = max(b - a for a, b in pairwise(self.borders))
        return ops.selected_attention(
            q, k, v, self.ids, self.cu_seqlens, longest, BLOCK, False, deterministic
        )[0]

    def gradients(self, *, deterministic: bool = False) -> tuple[Tensor, ...]:
        """Of q, k and v."""
        inputs = leaves(self.q, self.k, self.v)
        out = self.attend(*inputs, deterministic=deterministic)
        return torch.autograd.grad(out, inputs, self.grad)

    def errors(self) -> list[float]:
        """Relative errors of output and gradients against float64."""

        def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return oracle.selected(q, k, v, self.ids, self.cu_seqlens, BLOCK)

        return errors(self.attend, reference, [self.q, self.k, self.v], self.grad)


def some_choice(
    borders: tuple[int, ...], heads: int, groups: int, dtype: torch.dtype = torch.bfloat16
) -> Choice:
    """Random inputs; a token names its own block and up to seven before it, with holes between."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype, generator=generator)

    tokens = borders[-1]
    parts = []
    for start, stop in pairwise(borders):
        own = torch.arange(stop - start, device="cuda") // BLOCK
        blocks = torch.arange(max(8, stop // BLOCK + 1), device="cuda")
        rank = torch.rand(stop - start, groups, len(blocks), device="cuda", generator=generator)
        rank = rank.masked_fill(blocks > own[:, None, None], -1.0)
        rank = rank.masked_fill(blocks == own[:, None, None], 2.0)
        best = rank.topk(8)
        parts.append(torch.where(best.values > 0.2, best.indices, -1))
    return Choice(
        randn(tokens, heads, WIDTH), randn(tokens, groups, WIDTH), randn(tokens, groups, WIDTH),
        randn(tokens, heads, WIDTH), torch.cat(parts).to(torch.int32), borders,
    )  # fmt: skip


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Choice], tuple[Tensor, ...]]]:
    """Gradients by the Triton kernel of any card."""

    def gradients(choice: Choice) -> tuple[Tensor, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(selected, "takes_items", lambda *_: False)
            return choice.gradients()

    return gradients


def assert_alike(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert oracle.relative_error(one, other) < TOLERANCE / 2


@pytest.fixture(params=[True, False], ids=["runs of 64 bytes", "lines"])
def near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents count as short or as long for the way in which dq is added."""
    host = attend_host.hopper("item_backward")
    launch = replace(support.ITEM_BACKWARD, near_until=1 << 30 if request.param else 0)
    monkeypatch.setattr(host, "ITEM_BACKWARD", launch)


def test_one_small_document_agrees_with_float64() -> None:
    choice = some_choice((0, 333), 6, 1)
    assert support.takes_items(choice.q, choice.v, BLOCK)
    assert max(choice.errors()) < TOLERANCE


#: Documents of 1 to 700 tokens that begin anywhere, and a sum that is no multiple of 64.
BORDERS = ((0, 700), (0, 1, 64, 701, 1231), (0, 257, 258, 900, 1411, 1501))


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("borders", BORDERS, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(12, 2), (5, 1), (1, 1), (8, 4)])
def test_gradients_agree_with_float64_and_the_kernel_of_any_card(
    heads, groups, borders, dtype, plainly
) -> None:
    choice = some_choice(borders, heads, groups, dtype)
    found = choice.errors()
    assert max(found) < TOLERANCE, found
    assert_alike(choice.gradients(), plainly(choice))


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_groups_of_any_size_agree_with_the_kernel_of_any_card(size: int, plainly) -> None:
    choice = some_choice((0, 3, 1000), 2 * size, 2)
    assert_alike(choice.gradients(), plainly(choice))


#: Tokens that choose a block: rows for a part of a tile, one tile, an item, more than an item.
@pytest.mark.parametrize("num_queries", [1, 8, 63, 64, 65, 128, 129, 400])
@pytest.mark.parametrize("heads", [1, 6, 8])
def test_lists_of_every_length_agree_with_float64(heads: int, num_queries: int) -> None:
    choice = some_choice((0, 5, 705), heads, 1)
    ids = torch.full_like(choice.ids, -1)
    position = torch.arange(700, device="cuda", dtype=torch.int32)
    ids[:5, 0, 0] = 0
    ids[5:, 0, 0] = position // BLOCK
    ids[5 + 3 * BLOCK :][:num_queries, 0, 1] = 1
    assert max(replace(choice, ids=ids).errors()) < TOLERANCE


def test_nan_in_the_next_document_reaches_no_gradient() -> None:
    choice = some_choice((0, 333, 1000), 12, 2)
    before = [one[:333].clone() for one in choice.gradients()]
    for tensor in (choice.q, choice.k, choice.v, choice.grad):
        tensor[333:] = float("nan")
    for one, other in zip(before, choice.gradients(), strict=True):
        assert oracle.relative_error(other[:333], one) < TOLERANCE / 2


@pytest.mark.usefixtures("near")
def test_many_items_agree_with_the_kernel_of_any_card(plainly) -> None:
    choice = some_choice((0, 9001, 20001), 12, 2)  # two chunks
    for _ in range(3):
        assert_alike(choice.gradients(), plainly(choice))


def test_deterministic_gradients_take_the_kernel_of_any_card(monkeypatch) -> None:
    choice = some_choice((0, 700), 6, 1)
    monkeypatch.setattr(attend_host, "hopper", None)  # a call of it would fail
    first, second = (choice.gradients(deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
