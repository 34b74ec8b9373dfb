"""The probes of the full tier pass for the product and fail for what they are there to find."""

import math
from dataclasses import replace

import pytest
import torch

from nsa_core.checks.long_context import (
    ANGLE_LIMIT,
    angle_error,
    long_context_probe,
    packing_error,
)
from nsa_core.checks.numerics import LIMITS
from nsa_core.checks.probes import _Probes, run_probes
from nsa_core.config.model import RopeConfig
from nsa_core.config.recipe import resolve
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.model import rotary
from nsa_core.model.rotary import Rotary
from nsa_core.model.transformer import LanguageModel
from tests.core.checks.test_probes import SeesTheNextKey
from tests.core.model.cases import small_model

CPU = torch.device("cpu")
TINY = resolve("tiny-cpu", "cpu").config


def model_on(backend) -> LanguageModel:
    return small_model(backends=BranchBackends.of(backend), dtype=torch.float32)


def test_a_long_row_is_causal_and_linear_in_memory() -> None:
    found = long_context_probe(model_on(GatheredBackend()), num_tokens=1024)
    assert found.moved_token is None
    assert found.growth <= 1.2
    assert found.is_good


def test_masks_of_t_times_t_elements_are_found_by_their_growth() -> None:
    found = long_context_probe(model_on(ReferenceBackend()), num_tokens=256)
    assert found.growth > 1.7
    assert not found.is_good


def test_a_view_of_the_next_token_moves_the_output_before_the_change() -> None:
    found = long_context_probe(model_on(SeesTheNextKey()), num_tokens=256)
    assert found.moved_token is not None
    assert found.moved_token < 192
    assert not found.is_good


@pytest.mark.parametrize("moved", [1 + 2**-23, math.nan], ids=str)
def test_one_number_that_moves_by_its_last_bit_or_becomes_nan_is_found(
    monkeypatch: pytest.MonkeyPatch, moved
) -> None:
    model, first = model_on(GatheredBackend()), []

    def hidden(tokens_BT: torch.Tensor) -> torch.Tensor:
        if tokens_BT.shape[1] == 256:
            first.append(tokens_BT)
        out_NW = torch.ones(tokens_BT.shape[1], 16)
        if first:
            out_NW[:-1, 3][tokens_BT[0, 1:] != first[0][0, 1:]] = moved
        return out_NW

    monkeypatch.setattr(model, "hidden", hidden)
    assert long_context_probe(model, num_tokens=256).moved_token == 191


class HalfAngles(Rotary):
    """Positions and angles in bfloat16, as a module cast with its model would have them."""

    def tables(self, position_R: torch.Tensor):
        angle = position_R.bfloat16().unsqueeze(-1) * self.frequency.bfloat16()
        return angle.cos().float().unsqueeze(-2), angle.sin().float().unsqueeze(-2)


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
def test_angles_of_far_positions_are_exact_under_autocast(scaling: str) -> None:
    config = RopeConfig(scaling=scaling, scale=1.0 if scaling == "none" else 4.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert angle_error(Rotary(config, 64), config, 64, CPU) <= ANGLE_LIMIT


def test_angles_in_half_precision_are_found() -> None:
    assert angle_error(HalfAngles(RopeConfig(), 64), RopeConfig(), 64, CPU) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_that_were_rounded_to_half_precision_are_found(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    right = rotary.frequencies
    monkeypatch.setattr(rotary, "frequencies", lambda *inputs: right(*inputs).to(dtype))
    assert angle_error(Rotary(RopeConfig(), 64), RopeConfig(), 64, CPU) > 1
    (line,) = _Probes(TINY, "cpu", "full").angles()
    assert line.status == "fail"
    assert str(dtype) in line.measured


def test_frequencies_that_are_wide_again_but_have_lost_their_bits_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = rotary.frequencies
    monkeypatch.setattr(rotary, "frequencies", lambda *inputs: right(*inputs).bfloat16().float())
    (line,) = _Probes(TINY, "cpu", "full").angles()
    assert line.status == "fail"


def test_a_table_of_frequencies_in_another_precision_fails_however_exact_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary, "frequencies", rotary.exact_frequencies)
    (line,) = _Probes(TINY, "cpu", "full").angles()
    assert line.status == "fail"
    assert "torch.float64" in line.measured


class IgnoresBorders(GatheredBackend):
    """The window reaches into the document before."""

    def sliding(
        self, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGE: torch.Tensor, geometry, packing
    ):
        one = Packing.uniform(1, packing.num_tokens)
        return super().sliding(q_NHD, k_NGD, v_NGE, geometry, one)


def test_packed_documents_are_the_documents_alone() -> None:
    assert packing_error(model_on(GatheredBackend()), [13, 1, 4, 30]) <= LIMITS[torch.float32]


def test_a_window_across_a_border_is_found() -> None:
    assert packing_error(model_on(IgnoresBorders()), [13, 1, 4, 30]) > 1e-2


@pytest.mark.slow
def test_the_full_tier_passes_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sentinel of the standard tier: its own size takes a minute and is tested there."""
    monkeypatch.setattr(
        "nsa_core.checks.probes.SentinelSettings",
        lambda: replace(_settings(), steps=40, batch=4, seq_len=64, judged_steps=20),
    )
    monkeypatch.setattr("nsa_core.checks.probes.LONG_TOKENS", {"cpu": 2048})
    report = run_probes(TINY, "cpu", "full")
    statuses = {check.name: check.status for check in report.checks}
    assert {"long_context", "rope.angles", "packing"} <= statuses.keys()
    assert set(statuses.values()) == {"pass"}


def _settings():
    from nsa_core.checks.causality import SentinelSettings

    return SentinelSettings()
