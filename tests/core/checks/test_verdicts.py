"""What a probe measured decides its verdict: the judging functions alone, faults planted."""

import math

import pytest
import torch
from torch import nn

from nsa_core.checks import __main__ as command
from nsa_core.checks import decoding, probes
from nsa_core.checks.causality import SentinelResult, SentinelSettings
from nsa_core.checks.decoding import DecodeResult, decode_probe
from nsa_core.checks.long_context import ANGLE_LIMIT, LongContextResult, angle_error
from nsa_core.checks.numerics import (
    Parity,
    describe_dead_rows,
    follows_the_rules,
    parity_probe,
    trained_rows,
)
from nsa_core.checks.probes import _Probes
from nsa_core.config.model import RopeConfig
from nsa_core.config.recipe import resolve
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.reference import choose
from nsa_core.model.decode_step import DecodeLoop
from nsa_core.model.rotary import Rotary, exact_frequencies
from nsa_core.rundir.report import CheckResult, Report
from tests.core.checks.test_probes import SeesTheNextKey
from tests.core.model.cases import gradient_leaks, small_config, small_model

CPU = torch.device("cpu")
CONFIG = resolve("tiny-cpu", "cpu").config


def long_row(growth: float = 1.0, moved_token: int | None = None) -> LongContextResult:
    return LongContextResult(8192, memory_mib=1.0, growth=growth, moved_token=moved_token)


@pytest.mark.parametrize(
    ("check", "measure", "found", "status"),
    [
        ("decode", "decode_probe", DecodeResult(93, 0.9e-5), "pass"),
        ("decode", "decode_probe", DecodeResult(93, 1.1e-5), "fail"),
        ("decode", "decode_probe", DecodeResult(93, math.nan), "fail"),
        ("sentinel", "sentinel_probe", SentinelResult((), 4.15, limit=4.14), "pass"),
        ("sentinel", "sentinel_probe", SentinelResult((), 4.13, limit=4.14), "fail"),
        ("sentinel", "sentinel_probe", SentinelResult((), math.nan, limit=4.14), "fail"),
        ("angles", "angle_error", 0.0079, "pass"),
        ("angles", "angle_error", 0.0081, "fail"),
        ("angles", "angle_error", math.nan, "fail"),
        ("packing", "packing_error", 0.9e-5, "pass"),
        ("packing", "packing_error", 1.1e-5, "fail"),
        ("packing", "packing_error", math.nan, "fail"),
        ("long_context", "long_context_probe", long_row(growth=1.19), "pass"),
        ("long_context", "long_context_probe", long_row(growth=1.21), "fail"),
        ("long_context", "long_context_probe", long_row(moved_token=0), "fail"),
    ],
)
def test_a_verdict_follows_the_measurement_and_its_limit(
    monkeypatch: pytest.MonkeyPatch, check: str, measure: str, found, status: str
) -> None:
    monkeypatch.setattr(probes, measure, lambda *_, **__: found)
    (line,) = getattr(_Probes(CONFIG, "cpu", "full"), check)()
    assert line.status == status
    assert bool(line.hint) == (status == "fail")


def decoded() -> DecodeResult:
    model = small_model(dtype=torch.float32)
    return decode_probe(model, num_tokens=14, prompt=9)


def test_one_wrong_logit_of_the_last_token_is_a_difference_of_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LastStepIsOff(DecodeLoop):
        def step(self, token_B: torch.Tensor):
            made = super().step(token_B)
            made.logits_BV[0, 7] += 3e-5 if self.cache.length == 14 else 0
            return made

    assert decoded().is_equal
    monkeypatch.setattr(decoding, "DecodeLoop", LastStepIsOff)
    assert decoded().difference == pytest.approx(3e-5, rel=0.4)
    assert not decoded().is_equal


def test_a_wrong_prompt_is_a_difference_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoding.logits
    monkeypatch.setattr(decoding, "logits", lambda *inputs: right(*inputs) + 3e-5)
    assert not decoded().is_equal


class BendsOneGradient(GatheredBackend):
    """Right outputs; the gradient of one of q, k and v is 1 % too large."""

    def __init__(self, bent) -> None:
        super().__init__()
        self.bent = bent

    def bend(self, inputs):
        inputs = [tensor.clone() for tensor in inputs]
        if inputs[self.bent].requires_grad:
            inputs[self.bent].register_hook(lambda grad: grad * 1.01)
        return inputs

    def compressed(
        self, q_NHD: torch.Tensor, k_CGD: torch.Tensor, v_CGE: torch.Tensor, geometry, packing
    ):
        return super().compressed(*self.bend((q_NHD, k_CGD, v_CGE)), geometry, packing)

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        return super().selected(*self.bend((q_NHD, k_NGD, v_NGE)), ids_NGS, geometry, packing)

    def sliding(
        self, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGE: torch.Tensor, geometry, packing
    ):
        return super().sliding(*self.bend((q_NHD, k_NGD, v_NGE)), geometry, packing)


class BendsTheSecondDocument(GatheredBackend):
    """Right in the first document of a row; 1 % too large in those after it."""

    def bend(self, out_NHE: torch.Tensor, packing) -> torch.Tensor:
        first = int(packing.cu_seqlens[1])
        return torch.cat((out_NHE[:first], out_NHE[first:] * 1.01))

    def compressed(
        self, q_NHD: torch.Tensor, k_CGD: torch.Tensor, v_CGE: torch.Tensor, geometry, packing
    ):
        out_NHE, lse_NH = super().compressed(q_NHD, k_CGD, v_CGE, geometry, packing)
        return self.bend(out_NHE, packing), lse_NH

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        out_NHE = super().selected(q_NHD, k_NGD, v_NGE, ids_NGS, geometry, packing)
        return self.bend(out_NHE, packing)

    def sliding(
        self, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGE: torch.Tensor, geometry, packing
    ):
        return self.bend(super().sliding(q_NHD, k_NGD, v_NGE, geometry, packing), packing)


def parity(backend: BendsOneGradient | BendsTheSecondDocument | GatheredBackend) -> list[Parity]:
    return parity_probe(small_config(), BranchBackends.of(backend), CPU, torch.float32)


@pytest.mark.parametrize(("bent", "worst"), [(0, "dq"), (1, "dk"), (2, "dv")])
def test_a_wrong_gradient_fails_the_parity_of_every_branch(bent: int, worst: str) -> None:
    found = parity(BendsOneGradient(bent))
    assert [(one.branch, one.worst) for one in found] == [
        ("compressed", worst), ("selected", worst), ("sliding", worst),
    ]  # fmt: skip
    for one in found:
        assert one.error == pytest.approx(0.01, rel=0.01)
        assert not one.is_close


def test_a_fault_of_later_documents_alone_fails_the_parity_of_every_branch() -> None:
    assert all(one.is_close for one in parity(GatheredBackend()))
    assert not any(one.is_close for one in parity(BendsTheSecondDocument()))


FOUR_OF_FIVE = BlockGeometry(
    compress_block=4, compress_stride=2, select_block=4, num_selected=4, window=5
)


def judged(row):
    """Whether a choice is accepted in which one group of the last token has this row."""
    chosen_TGS = torch.full((20, 2, 4), -1)
    for position in range(20):
        blocks = choose([0.0] * 5, position, FOUR_OF_FIVE)
        chosen_TGS[position, :, : len(blocks)] = torch.tensor(blocks)
    exact_TGS = chosen_TGS.clone()
    chosen_TGS[-1, 1] = torch.tensor(row)
    return follows_the_rules(chosen_TGS, exact_TGS, torch.arange(20), FOUR_OF_FIVE).all()


def test_another_block_among_the_free_ones_breaks_no_rule() -> None:
    assert judged([0, 1, 3, 4])
    assert judged([0, 2, 3, 4])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([0, 3, 4, -1], id="one-too-few"),
        pytest.param([1, 0, 3, 4], id="not-ascending"),
        pytest.param([0, 3, 3, 4], id="one-twice"),
        pytest.param([0, 3, 4, 5], id="of-the-future"),
        pytest.param([1, 2, 3, 4], id="without-the-first"),
        pytest.param([0, 1, 2, 4], id="without-the-one-before"),
        pytest.param([0, 1, 2, 3], id="without-the-current-one"),
    ],
)
def test_a_choice_that_breaks_one_rule_is_refused(row: list[int]) -> None:
    assert not judged(row)


@pytest.mark.parametrize(
    ("grad", "is_trained"),
    [
        (None, [False, False]),
        ([0.0, 1.0], [False, True]),
        ([math.nan, 1.0], [False, True]),
        ([1.0, math.inf], [True, False]),
        ([0.0, -1e-30], [False, True]),
        ([[0.0, 0.0], [0.0, 1.0]], [False, True]),
        ([[1.0, math.nan], [1.0, 1.0]], [False, True]),
        ([[[0.0, 1.0]], [[0.0, 0.0]]], [True, False]),
    ],
)
def test_a_row_is_trained_by_a_finite_gradient_that_is_not_zero(
    grad, is_trained: list[bool]
) -> None:
    parameter = nn.Parameter(torch.ones(2) if grad is None else torch.ones_like(torch.tensor(grad)))
    parameter.grad = None if grad is None else torch.tensor(grad)
    assert trained_rows(parameter).tolist() == is_trained


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([False, False], "kv"),
        ([True, False, False, True, False], "kv, rows 1 to 2"),
        ([True, False], "kv, rows 1 to 1"),
    ],
)
def test_a_cut_off_slice_is_named_by_its_rows(rows: list[bool], words: str) -> None:
    assert describe_dead_rows("kv", torch.tensor(rows)) == words


class ExactAngles(Rotary):
    """The exact frequencies, and everything after them in float64."""

    def tables(self, position_R: torch.Tensor):
        angle = position_R.double()[:, None] * exact_frequencies(RopeConfig(), 64)
        return angle.cos()[:, None], angle.sin()[:, None]


def test_angles_are_held_against_float64() -> None:
    assert angle_error(ExactAngles(RopeConfig(), 64), RopeConfig(), 64, CPU) == 0
    assert 1e-4 < angle_error(Rotary(RopeConfig(), 64), RopeConfig(), 64, CPU) < ANGLE_LIMIT


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_margin_of_the_sentinel_is_three_standard_errors_on_every_device(device: str) -> None:
    """A spread of 1 nat a token is the most that `SentinelSettings` allows for."""
    settings = SentinelSettings.on(torch.device(device))
    judged_tokens = settings.judged_steps * settings.batch * settings.seq_len
    assert settings.margin >= 3 / math.sqrt(judged_tokens)
    assert settings.steps > settings.judged_steps


def test_a_gradient_from_the_very_next_token_is_a_leak() -> None:
    config = small_config(num_layers=1)
    model = small_model(config, backends=BranchBackends.of(SeesTheNextKey()))
    assert gradient_leaks(model, length=14, outputs=(3, 9)) == [(3, 4), (9, 10)]


def planted(status):
    """Probes that find this in the second of three checks, and tell each."""
    checks = [CheckResult(name=name, status="pass", message="") for name in ("first", "last")]
    found = {"measured": "7 leaks", "limit": "0 leaks", "hint": "look at the masks"}
    checks.insert(1, CheckResult(name="planted", status=status, message="moved", **found))

    def run_probes(_config, _device, _tier, tell, _begin) -> Report:
        for check in checks if tell else ():
            tell(check)
        return Report(at=0.0, checks=checks)

    return run_probes


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("warn", 0), ("fail", 9)])
def test_the_lines_of_the_command_say_what_was_measured_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    monkeypatch.setattr(probes, "run_probes", planted(status))
    assert command.main(["--device", "cpu"]) == code
    out = capsys.readouterr().out
    assert f"{status:8} planted                  7 leaks (limit 0 leaks): moved\n" in out
    assert ("look at the masks" in out) == (status != "pass")
    assert out.endswith(f"verdict: {status}\n")


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("warn", 0), ("fail", 9)])
def test_the_json_of_the_command_is_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    monkeypatch.setattr(probes, "run_probes", planted(status))
    assert command.main(["--device", "cpu", "--json"]) == code
    report = Report.model_validate_json(capsys.readouterr().out)
    assert [check.name for check in report.checks] == ["first", "planted", "last"]
    assert report.verdict == status


def test_a_check_is_reported_before_the_next_probe_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    right = _Probes.choice

    def choice(made):
        assert [check.name for check in told][-3:] == [
            "parity.compressed", "parity.selected", "parity.sliding",
        ]  # fmt: skip
        return right(made)

    monkeypatch.setattr(_Probes, "choice", choice)
    monkeypatch.setattr(_Probes, "perturbation", lambda _: iter(()))  # the slowest of the tier
    report = probes.run_probes(CONFIG, "cpu", "quick", told.append)
    assert told == report.checks
