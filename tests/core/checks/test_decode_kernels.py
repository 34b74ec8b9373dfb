"""The probe of a card's decode kernels: passes what is right, and notices each planted fault."""

from dataclasses import replace

import pytest
import torch

from nsa_core.checks import probes
from nsa_core.checks.decoding import (
    LIMITS,
    TIE,
    DecodeKernelsResult,
    DecodeResult,
    _is_good_choice,
    decode_kernels_probe,
)
from nsa_core.checks.probes import _Probes
from nsa_core.config.recipe import resolve
from nsa_core.kernels.decode_attention import CachedPairs, CountedReads, GatheredDecode
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model import decode_step
from tests.core.model.cases import small_config, small_model

CONFIG = resolve("tiny-cpu", "cpu").config


class Kernels(GatheredDecode):
    """Stands in for the kernels: right, and computed in float32."""

    name = "triton"


class WindowIsOneShort(Kernels):
    """The oldest key of the window is not read; the count says that it was."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        shorter = replace(geometry, window=geometry.window - 1)
        wrong = super().attend(q_BHD, pairs, gate_BH3, position_B, shorter)
        return replace(right, out_BHE=wrong.out_BHE)


class SeesTheNextRow(Kernels):
    """The row behind the newest chosen key is read as if it were the newest."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        k, v = pairs.selected
        ahead = CachedPairs(pairs.compressed, (k.roll(-1, 1), v.roll(-1, 1)), pairs.sliding)
        wrong = super().attend(q_BHD, ahead, gate_BH3, position_B, geometry)
        return replace(right, out_BHE=wrong.out_BHE)


class SwapsTheSequences(Kernels):
    """Each sequence gets the output of the other."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        return replace(right, out_BHE=right.out_BHE.flip(0))


class ChoosesTheOldest(Kernels):
    """Names the first blocks instead of the best ones; the forced ones stay."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        oldest = super().attend(q_BHD * 0, pairs, gate_BH3, position_B, geometry)
        return replace(right, ids_BGS=oldest.ids_BGS)


class CountsOneKeyTwice(Kernels):
    """One more compressed key is counted than is there."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        read = right.counted
        more = torch.cat((read.compressed, torch.ones_like(read.compressed[..., :1])), dim=-1)
        return replace(right, counted=CountedReads(more, read.selected, read.sliding))


class WritesNaN(Kernels):
    """One number of the last sequence is NaN."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        right.out_BHE[-1, -1, -1] = torch.nan
        return right


class RoundsLikeHalf(Kernels):
    """In float32 it says what float16 would say."""

    def attend(
        self, q_BHD: torch.Tensor, pairs, gate_BH3: torch.Tensor, position_B: torch.Tensor, geometry
    ):
        right = super().attend(q_BHD, pairs, gate_BH3, position_B, geometry)
        return replace(right, out_BHE=right.out_BHE.half().to(q_BHD.dtype))


def probe(kernels, dtype=torch.float32) -> DecodeKernelsResult:
    # More blocks than may be chosen, with one that is not forced: the choice can be wrong.
    config = small_config(nsa={"num_selected": 4})
    return decode_kernels_probe(small_model(config, dtype=torch.float32), kernels, dtype)


@pytest.mark.parametrize("dtype", LIMITS)
def test_right_kernels_pass_in_every_precision(dtype) -> None:
    found = probe(Kernels(), dtype)
    assert found.is_equal
    assert 0 < found.error <= LIMITS[dtype]
    assert found.num_steps > 10


@pytest.mark.parametrize(
    "kernels",
    [WindowIsOneShort(), SeesTheNextRow(), SwapsTheSequences(), WritesNaN(), RoundsLikeHalf()],
    ids=lambda kernels: type(kernels).__name__,
)
def test_a_wrong_output_fails(kernels) -> None:
    found = probe(kernels)
    assert not found.error <= found.limit
    assert not found.is_equal
    assert (found.wrong_choices, found.wrong_reads) == (0, 0)


def test_a_poor_choice_fails() -> None:
    found = probe(ChoosesTheOldest())
    assert found.wrong_choices > 0
    assert not found.is_equal


def test_a_wrong_count_fails() -> None:
    found = probe(CountsOneKeyTwice())
    assert found.wrong_reads > 0
    assert found.error <= found.limit
    assert not found.is_equal


GEOMETRY = BlockGeometry(4, 2, 4, num_selected=4, window=5)


@pytest.mark.parametrize(
    ("ids", "is_good"),
    [
        ([0, 1, 4, 5], True),
        ([0, 2, 4, 5], True),  # less than TIE below block 1
        ([0, 3, 4, 5], False),  # more than TIE below it
        ([0, 1, 5, 4], False),
        ([0, 4, 4, 5], False),
        ([1, 2, 4, 5], False),
        ([0, 1, 2, 5], False),
        ([0, 1, 2, 4], False),
        ([0, 4, 5, -1], False),
        ([0, 4, 5, 6], False),
        ([0, -2, 4, 5], False),
    ],
    ids=str,
)
def test_a_choice_may_differ_from_the_exact_one_only_by_a_tie(
    ids: list[int], is_good: bool
) -> None:
    scores = torch.tensor([[[0.0, 1.0, 1 - TIE / 2, 1 - 2 * TIE, 0.1, 0.1, 9.0]]]).double()
    wanted = torch.tensor([[[0, 1, 4, 5]]])
    found = _is_good_choice(torch.tensor([[ids]]), wanted, scores, torch.tensor([22]), GEOMETRY)
    assert found.item() is is_good


@pytest.fixture
def decodes_with(monkeypatch: pytest.MonkeyPatch):
    """Let the probes, and generation, decode with these kernels."""

    def choose(kernels) -> None:
        for module in (probes, decode_step):
            monkeypatch.setattr(module, "choose_decode_attention", lambda *_: kernels)

    return choose


def rows(config=CONFIG):
    return {check.name: check for check in _Probes(config, "cpu", "quick").decode_kernels()}


def test_the_checks_hold_the_kernels_of_generation_in_its_precision_and_whole_steps(
    decodes_with,
) -> None:
    decodes_with(Kernels())
    found = rows()
    assert found.keys() == {"decode.kernels.fp32", "decode.steps"}
    assert {check.status for check in found.values()} == {"pass"}


def test_the_checks_hold_the_kernels_in_the_precision_of_the_run_too(
    decodes_with, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes_with(Kernels())
    monkeypatch.setattr(
        probes, "decode_kernels_probe",
        lambda _model, _kernels, dtype: DecodeKernelsResult(dtype, 1, 0.0, 0, 0, 0),
    )  # fmt: skip
    monkeypatch.setattr(probes, "decode_probe", lambda *_, **__: DecodeResult(1, 0.0))
    made = _Probes(CONFIG, "cpu", "quick")
    made.dtype = torch.bfloat16
    names = [check.name for check in made.decode_kernels()]
    assert names == ["decode.kernels.fp32", "decode.kernels.bf16", "decode.steps"]


def test_a_fault_of_the_kernels_fails_the_checks_and_leaves_prefill_alone(decodes_with) -> None:
    decodes_with(WindowIsOneShort())
    found = rows()
    assert {check.status for check in found.values()} == {"fail"}
    assert all(check.hint for check in found.values())


def test_no_row_says_anything_of_kernels_that_are_not_used() -> None:
    assert rows() == {}


def test_every_run_of_the_probes_judges_the_kernels(
    decodes_with, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes_with(SwapsTheSequences())
    for other in ("parity", "choice", "layer", "gradients", "perturbation"):
        monkeypatch.setattr(_Probes, other, lambda _: iter(()))
    report = probes.run_probes(CONFIG, "cpu", "quick")
    failed = {check.name for check in report.checks if check.status == "fail"}
    assert "decode.kernels.fp32" in failed
    assert report.verdict == "fail"
