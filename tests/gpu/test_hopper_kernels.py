"""Hopper's Gluon kernels on a card, beside the Triton kernels of any card."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton import attend_host, index, row_terms
from nsa_core.kernels.triton.document_slots import Documents, documents
from nsa_core.kernels.triton.hopper import support
from nsa_core.kernels.triton.sources import (
    GradientSource,
    Mode,
    chosen_mode,
    compressed_mode,
    sliding_mode,
)
from tests import oracle
from tests.gpu.test_triton_backend import SHAPES, Case, branch_errors, poison

Result = TypeVar("Result")
pytestmark = pytest.mark.gpu
__all__ = ["poison"]  # the fixture: every test here finds NaN in fresh memory

TOLERANCE = 1e-2
MODES = ("compressed", "sliding", "chosen")


@pytest.fixture(autouse=True)
def only_on_hopper() -> None:
    reason = support.refusal(torch.cuda.get_device_capability(), torch.bfloat16, None, None)
    if reason is not None:
        pytest.skip(f"the Gluon kernels do not run here: {reason}")


@dataclass(frozen=True)
class OneBranch:
    """Inputs of one branch, and what each kind of kernel makes of them."""

    q: Tensor
    grad: Tensor
    k: Tensor
    v: Tensor
    borders: tuple[int, ...]
    mode: Mode

    def docs(self) -> Documents:
        cu = torch.tensor(self.borders, dtype=torch.int32, device="cuda")
        longest = max(b - a for a, b in itertools.pairwise(self.borders))
        return documents(cu, len(self.q), longest, 64)

    def forward(self) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.q, float("nan"))
        lse = torch.full(self.q.shape[:2], float("nan"), device="cuda")
        attend_host.forward(self.q, self.k, self.v, self.docs(), self.mode, (out, lse))
        return out, lse

    def source(self, *, planes: bool) -> GradientSource:
        terms = row_terms.prepare(self.grad, *self.forward(), self.docs(), planes=planes)
        return GradientSource(self.mode, self.k, self.v, terms)

    def run(self, *, planes: bool, deterministic: bool = False) -> tuple[Tensor, Tensor]:
        into = torch.full_like(self.k, float("nan")), torch.full_like(self.v, float("nan"))
        source = self.source(planes=planes)
        attend_host.key_gradient(
            self.q, self.grad, source, self.docs(), into, deterministic=deterministic
        )
        return into

    def used(self) -> Tensor:
        """Which rows of k belong to a document: slots of the compressed keys may be unused."""
        used = torch.ones(len(self.k), dtype=torch.bool, device="cuda")
        if self.mode.kind == 0:
            used.zero_()
            for a, b in itertools.pairwise(self.borders):
                used[a // 16 : a // 16 + max(b - a - 16, 0) // 16] = True
        return used


def one_branch(
    name: str, borders: tuple[int, ...], heads: int, groups: int, width: int, dtype: torch.dtype
) -> OneBranch:
    tokens = borders[-1]
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype, generator=generator)

    rows = tokens // 16 if name == "compressed" else tokens
    longest = max(b - a for a, b in itertools.pairwise(borders))
    padded = 64 * (tokens // 64 + len(borders) - 1)
    words = torch.randint(
        -(2**31), 2**31 - 1, (groups, index.num_words(longest, 64), padded),
        device="cuda", generator=generator, dtype=torch.int32,
    )  # fmt: skip
    modes = {
        "compressed": compressed_mode(32, 16), "sliding": sliding_mode(200),
        "chosen": chosen_mode(words),
    }  # fmt: skip
    q, grad = randn(tokens, heads, width), randn(tokens, heads, width)
    k, v = randn(rows, groups, width), randn(rows, groups, width)
    return OneBranch(q, grad, k, v, borders, modes[name])


#: Documents begin at any token, and have 1, 63, 64 and 65 tokens, and more than 32 blocks; groups
#: have odd and even numbers of heads.
SIZES = (
    ((0, 1, 701, 2100, 2163, 4847), 12, 2, 64),
    ((0, 64, 129, 192, 1025), 16, 1, 128),
    ((0, 3, 700), 5, 1, 64),
    ((0, 130, 777), 6, 2, 128),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MODES)
def test_both_kinds_of_kernels_make_the_same_gradients(name, sizes, dtype) -> None:
    case = one_branch(name, *sizes, dtype)
    used = case.used()
    for deterministic in (False, True):
        ours = case.run(planes=True, deterministic=deterministic)
        plain = case.run(planes=False, deterministic=deterministic)
        for one, other in zip(ours, plain, strict=True):
            assert oracle.relative_error(one[used], other[used]) < TOLERANCE / 2


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", MODES)
def test_nan_in_the_next_document_changes_no_bit_of_a_gradient(name: str, width: int) -> None:
    case = one_branch(name, (0, 333, 1000), 4, 2, width, torch.bfloat16)
    rows = 333 // 16 - 1 if name == "compressed" else 333
    before = [one[:rows].clone() for one in case.run(planes=True, deterministic=True)]
    for tensor in (case.q, case.grad, case.k, case.v):
        tensor[len(tensor) * 333 // 1000 + 1 :] = float("nan")
    case.q[333:] = case.grad[333:] = float("nan")
    after = case.run(planes=True, deterministic=True)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other[:rows])


@pytest.mark.parametrize("name", MODES)
def test_deterministic_key_gradients_repeat_bit_by_bit(name: str) -> None:
    case = one_branch(name, (0, 3000, 4500, 4577), 12, 2, 64, torch.bfloat16)
    used = case.used()
    first, second = (case.run(planes=True, deterministic=True) for _ in range(2))
    assert all(torch.equal(a[used], b[used]) for a, b in zip(first, second, strict=True))


#: Wide heads, whose forward and dq are Hopper's too: more than 32 blocks, rows that see nothing.
WIDE = (
    ((0, 1, 64, 129, 192, 1025, 3300), 16, 1, 128),
    ((0, 130, 777), 4, 2, 128),
    ((0, 14, 29, 30), 2, 1, 128),
)
#: Heads whose dq is Hopper's; the last takes a program of 132 several turns.
QUERIES = (
    *WIDE,
    ((0, 1, 64, 129, 192, 1025, 3300), 12, 2, 64),
    ((0, 130, 777), 3, 1, 64),
    ((0, 40, 2100, 7000), 12, 2, 64),
)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Result]], Result]:
    """Call a function with the Triton kernels of any card."""

    def call(function: Callable[[], Result]) -> Result:
        with monkeypatch.context() as patch:
            for name in ("takes_forward", "takes_query_gradient"):
                patch.setattr(attend_host, name, lambda *_: False)
            return function()

    return call


@pytest.mark.parametrize("sizes", WIDE, ids=str)
@pytest.mark.parametrize("name", MODES)
def test_both_kinds_of_kernels_attend_alike(name, sizes, plainly) -> None:
    case = one_branch(name, *sizes, torch.bfloat16)
    assert support.takes_forward(case.q, case.k, case.v, 64)
    (out, lse), (plain, plain_lse) = case.forward(), plainly(case.forward)
    assert oracle.relative_error(out, plain) < TOLERANCE / 2
    assert torch.equal(lse.isinf(), plain_lse.isinf())
    assert torch.allclose(lse, plain_lse, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", QUERIES, ids=str)
@pytest.mark.parametrize("names", [*([name] for name in MODES), MODES[:2], MODES], ids="-".join)
def test_both_kinds_of_kernels_make_the_same_gradient_of_queries(
    names, sizes, dtype, plainly
) -> None:
    cases = [one_branch(name, *sizes, torch.bfloat16) for name in names]
    assert support.takes_query_gradient(cases[0].q, cases[0].k, cases[0].v, 64)
    sources = [case.source(planes=True) for case in cases]

    def gradient() -> Tensor:
        return attend_host.query_gradient(
            cases[0].q, cases[0].grad, sources, cases[0].docs(), dtype=dtype
        )

    ours, plain = gradient(), plainly(gradient)
    assert ours.dtype == plain.dtype == dtype
    assert oracle.relative_error(ours, plain) < TOLERANCE / 2


def test_whole_operators_of_wide_heads_run_without_the_kernels_of_any_card(monkeypatch) -> None:
    def forbidden(kernel, *_: object, **__: object) -> None:
        pytest.fail(f"{kernel.__name__} was launched")

    monkeypatch.setattr(attend_host, "run", forbidden)
    *sizes, dtype = SHAPES[1]
    for name, found in branch_errors(Case(*sizes, dtype=dtype)).items():
        assert max(found) < TOLERANCE, f"{name}: {found}"


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", MODES)
def test_a_broken_key_and_value_reach_the_tokens_that_see_them_and_no_bit_of_others(
    name: str, broken: float
) -> None:
    case = one_branch(name, (0, 700), 4, 2, 128, torch.bfloat16)
    if name == "chosen":
        case.mode.bits.fill_(-1)
    out, lse = (one.clone() for one in case.forward())
    key = 300 // 16 if name == "compressed" else 300
    first = key * 16 + 31 if name == "compressed" else key
    case.v[key, 0, 5] = case.v[key, 1, 7] = broken
    hidden = case.forward()[0]
    assert torch.equal(hidden[:first], out[:first])
    assert hidden[first, :2, 5].isnan().all()
    assert hidden[first, 2:, 7].isnan().all()
    unseen = torch.arange(128, device="cuda") != 5
    assert torch.equal(hidden[first, :2][:, unseen], out[first, :2][:, unseen])
    case.k[key] = float("nan")
    again, again_lse = case.forward()
    assert torch.equal(again[:first], out[:first])
    assert torch.equal(again_lse[:first], lse[:first])


@pytest.mark.parametrize("sizes", [(4, 2, 128), (6, 2, 64)], ids=str)
@pytest.mark.parametrize("name", MODES)
def test_nan_in_the_next_document_changes_no_bit_of_output_and_dq(name: str, sizes) -> None:
    case = one_branch(name, (0, 333, 1000), *sizes, torch.bfloat16)

    def found() -> list[Tensor]:
        source = case.source(planes=True)
        dq = attend_host.query_gradient(case.q, case.grad, [source], case.docs())
        return [one[:333].clone() for one in (*case.forward(), dq)]

    before = found()
    for tensor in (case.q, case.grad, case.k, case.v):
        tensor[len(tensor) * 333 // 1000 + 1 :] = float("nan")
    case.q[333:] = case.grad[333:] = float("nan")
    assert all(torch.equal(*pair) for pair in zip(before, found(), strict=True))


@pytest.mark.parametrize("arguments", SHAPES[:2], ids=str)
def test_a_triton_that_is_not_proven_takes_the_kernels_of_any_card(arguments, monkeypatch) -> None:
    *sizes, dtype = arguments
    monkeypatch.setattr(support, "PROVEN_TRITON", ())
    monkeypatch.setattr(attend_host, "hopper", None)  # a call of it would fail
    for name, found in branch_errors(Case(*sizes, dtype=dtype)).items():
        assert max(found) < TOLERANCE, f"{name}: {found}"
