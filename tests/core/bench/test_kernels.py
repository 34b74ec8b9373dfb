"""What a row of the kernel bench says of its timings, with the timings planted."""

from dataclasses import replace

import pytest
import torch

from nsa_core.bench import kernels
from nsa_core.bench.cases import SHAPES, Case
from nsa_core.bench.kernels import CaseResult, KernelRequest, KernelRow, measure_row

REQUEST = KernelRequest(("A",), (2048,), tokens=4096, dtype=torch.bfloat16, runs=3)


def planted_row(
    monkeypatch: pytest.MonkeyPatch, *, nsa_spread=0.01, cudnn_spread=0.01
) -> KernelRow:
    """A row of these timings: forward, forward and backward in ms, peak in GiB, spread."""
    timings = {
        "nsa": CaseResult(1.0, 6.0, 0.5, nsa_spread),
        "compressed": CaseResult(0.1, 0.6, 0.1, 0.9),
        "cudnn": CaseResult(4.0, 8.0, 0.7, cudnn_spread),
        "flash": CaseResult(5.0, 20.0, 0.8, 0.9),
    }

    def case(name) -> Case:
        return Case(name, lambda: torch.empty(0), [], torch.empty(0))

    monkeypatch.setattr(kernels, "dense_case", lambda name, *_: case(name))
    monkeypatch.setattr(kernels, "nsa_cases", lambda *_: [case("nsa"), case("compressed")])
    monkeypatch.setattr(kernels, "run_case", lambda one, _: timings[one.name])
    return measure_row(SHAPES["A"], 2048, REQUEST, tflops=600.0)


def test_the_ratio_is_of_forward_with_backward_and_below_one_where_nsa_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = planted_row(monkeypatch)
    assert row.ratio_to_cudnn == 6 / 8
    assert (row.fwd_ms, row.fwd_bwd_ms) == (1, 6)
    assert (row.dense_cudnn_fwd_ms, row.dense_cudnn_fwd_bwd_ms) == (4, 8)
    assert (row.dense_flash_fwd_ms, row.dense_flash_fwd_bwd_ms) == (5, 20)
    assert (row.peak_gib, row.dense_cudnn_peak_gib) == (0.5, 0.7)
    assert row.branches_ms == {"compressed": (0.1, 0.6)}


@pytest.mark.parametrize("flag", ["length", "tokens", "runs"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(flag: str, value: int) -> None:
    planted = {"lengths": (value,)} if flag == "length" else {flag: value}
    with pytest.raises(ValueError, match=rf"^--{flag} must be at least 1, got {value}$"):
        replace(REQUEST, **planted)


@pytest.mark.parametrize(("nsa", "cudnn"), [(0.02, 0.05), (0.05, 0.02)])
def test_the_spread_is_the_larger_of_both_sides_of_the_ratio(
    monkeypatch: pytest.MonkeyPatch, nsa: float, cudnn: float
) -> None:
    assert planted_row(monkeypatch, nsa_spread=nsa, cudnn_spread=cudnn).spread == 0.05
