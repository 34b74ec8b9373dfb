"""The checks reach every path that a run takes: a fault of one path alone turns them red."""

from math import nan

import pytest
import torch

from nsa_core.checks import probes
from nsa_core.checks.layer import expected_attention, layer_probe
from nsa_core.checks.numerics import Parity, choice_regret, parity_probe, short_length
from nsa_core.checks.probes import _Probes
from nsa_core.config.model import RopeConfig
from nsa_core.config.recipe import resolve
from nsa_core.kernels import decode_attention as step_kernels
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import MASKED_LENGTH_FACTOR, GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.kernels.selection import choose_blocks
from nsa_core.model.rotary import Rotary, rotate
from nsa_core.model.transformer import LanguageModel
from tests.core.checks.test_probes import OneOperator
from tests.core.model.cases import run_attention, small_config, small_model

CPU = torch.device("cpu")
CONFIG = resolve("tiny-cpu", "cpu").config
LONG = MASKED_LENGTH_FACTOR * CONFIG.model.nsa.num_selected * CONFIG.model.nsa.select_block


#: The proportions of `m7c-125m`: l = 2 d, l' = 4 d.
SETS = ["model.nsa.compress_block=16", "model.nsa.compress_stride=8", "model.nsa.select_block=32"]
FOUR_STRIDES = resolve("tiny-cpu", "cpu", sets=SETS).config


def probing(monkeypatch: pytest.MonkeyPatch, backend, tier="quick", config=CONFIG) -> _Probes:
    """The probes of a run on this backend."""
    monkeypatch.setattr(probes, "choose_backends", lambda *_: BranchBackends.of(backend))
    return _Probes(config, "cpu", tier)


def found(checks):
    return {check.name: check.status for check in checks}


class BendsLongGradients(GatheredBackend):
    """Right values; beyond the crossover the gradient of the chosen keys is 1 % too large."""

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        if packing.max_seqlen > LONG and k_NGD.requires_grad:
            k_NGD = k_NGD.clone()
            k_NGD.register_hook(lambda grad: grad * 1.01)
        return super().selected(q_NHD, k_NGD, v_NGE, ids_NGS, geometry, packing)


class DropsAKeyOfLongDocuments(GatheredBackend):
    """Beyond the crossover the first chosen block of each token is left out."""

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        if packing.max_seqlen > LONG:
            several = (ids_NGS >= 0).sum(-1) > 1
            ids_NGS = ids_NGS.clone()
            ids_NGS[..., 0] = torch.where(several, -1, ids_NGS[..., 0])
        return super().selected(q_NHD, k_NGD, v_NGE, ids_NGS, geometry, packing)


@pytest.mark.parametrize("backend", [BendsLongGradients(), DropsAKeyOfLongDocuments()])
def test_a_fault_beyond_the_crossover_fails_the_long_rows_alone(
    monkeypatch: pytest.MonkeyPatch, backend: BendsLongGradients | DropsAKeyOfLongDocuments
) -> None:
    status = found(probing(monkeypatch, backend, "full").parity())
    assert [name for name, one in status.items() if one != "pass"] == ["parity.selected.long"]


def test_rows_beyond_the_crossover_are_compared_where_a_run_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = probing(monkeypatch, GatheredBackend())
    assert not any(name.endswith(".long") for name in found(plain.parity()))
    batch = CONFIG.batch.model_copy(update={"seq_len": plain.long_length()})
    plain.config = CONFIG.model_copy(update={"batch": batch})
    seen = []
    monkeypatch.setattr(probes, "parity_probe", lambda *words: seen.append(words[4]) or [])
    assert list(plain.parity()) == []
    assert seen == [None, plain.long_length()]
    assert plain.long_length() > LONG


def test_the_reference_in_chunks_equals_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config, backends = small_config(nsa={"num_selected": 4}), BranchBackends.of(ReferenceBackend())
    monkeypatch.setitem(parity_probe.__globals__["_CHUNK_SCORES"], "cpu", 300)
    for one in parity_probe(config, backends, CPU, torch.float32):
        assert one.error < 1e-6, one


@pytest.mark.parametrize(
    "weights", [(1, 1, 1, 1, 1), (1, 2, 2, 2, 0), (0, 2, 2, 2, 1)], ids=["ones", "last", "first"]
)
@pytest.mark.parametrize("tier", ["quick", "full"])
def test_wrong_weights_in_equation_9_fail_the_choice(
    monkeypatch: pytest.MonkeyPatch, weights: tuple[int, ...], tier: str
) -> None:
    made = probing(monkeypatch, GatheredBackend(), tier, FOUR_STRIDES)
    assert found(made.choice()) == {"parity.choice": "pass"}
    assert BlockGeometry.from_config(FOUR_STRIDES.model.nsa).overlap_weights == (1, 2, 2, 2, 1)
    monkeypatch.setattr(BlockGeometry, "overlap_weights", weights)
    (check,) = made.choice()
    assert check.status == "fail"
    assert float(check.measured.split()[0]) > 5e-3


class ChoosesPoorlyInRowsOfTheRun(OneOperator):
    """As a kernel of its own for short documents might."""

    def recorded(self, ids_NGS: torch.Tensor, packing) -> torch.Tensor:
        is_short = packing.max_seqlen <= FOUR_STRIDES.batch.seq_len
        return torch.zeros_like(ids_NGS) if is_short else ids_NGS


def test_one_operator_is_judged_by_its_own_choice_in_rows_of_the_run_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nsa, row = FOUR_STRIDES.model.nsa, FOUR_STRIDES.batch.seq_len
    assert nsa.num_selected * nsa.select_block < row < short_length(FOUR_STRIDES.model)
    right = {"parity.choice": "pass", "parity.choice.rows": "pass"}
    good = probing(monkeypatch, OneOperator(), config=FOUR_STRIDES)
    assert found(good.choice()) == right
    poor = probing(monkeypatch, ChoosesPoorlyInRowsOfTheRun(), config=FOUR_STRIDES)
    assert found(poor.choice()) == right | {"parity.choice.rows": "fail"}


def test_rows_in_which_every_block_is_taken_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    nsa = FOUR_STRIDES.model.nsa
    row = nsa.num_selected * nsa.select_block
    config = resolve("tiny-cpu", "cpu", sets=[*SETS, f"batch.seq_len={row}"]).config
    made = probing(monkeypatch, ChoosesPoorlyInRowsOfTheRun(), config=config)
    assert found(made.choice()) == {"parity.choice": "pass"}


def test_only_free_blocks_of_tokens_with_a_choice_are_counted() -> None:
    result = choice_regret(CONFIG.model, BranchBackends.of(GatheredBackend()), CPU, torch.float32)
    nsa = CONFIG.model.nsa
    tokens = short_length(CONFIG.model) - nsa.num_selected * nsa.select_block
    assert result.num_choices == tokens * CONFIG.model.num_kv_groups
    assert result.regret <= 1e-6


def test_where_all_blocks_are_forced_there_is_no_choice_to_judge() -> None:
    config = small_config(nsa={"num_selected": 3})
    result = choice_regret(config, BranchBackends.of(GatheredBackend()), CPU, torch.float32)
    assert (result.num_choices, result.regret, result.is_good) == (0, 0.0, True)


class CutsOff(GatheredBackend):
    """One key or value of one branch gets no gradient."""

    def __init__(self, branch, place) -> None:
        super().__init__()
        self.branch, self.place = branch, place

    def cut(self, branch, inputs):
        return [x.detach() if (branch, n) == (self.branch, self.place) else x
                for n, x in enumerate(inputs)]  # fmt: skip

    def compressed(
        self, q_NHD: torch.Tensor, k_CGD: torch.Tensor, v_CGE: torch.Tensor, geometry, packing
    ):
        return super().compressed(*self.cut("cmp", (q_NHD, k_CGD, v_CGE)), geometry, packing)

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        qkv = self.cut("slc", (q_NHD, k_NGD, v_NGE))
        return super().selected(*qkv, ids_NGS, geometry, packing)

    def sliding(
        self, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGE: torch.Tensor, geometry, packing
    ):
        return super().sliding(*self.cut("win", (q_NHD, k_NGD, v_NGE)), geometry, packing)


@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_a_slice_of_a_fused_matrix_without_gradient_fails(
    monkeypatch: pytest.MonkeyPatch, branch: str, place: int
) -> None:
    (check,) = probing(monkeypatch, CutsOff(branch, place)).gradients()
    assert check.status == "fail"
    assert "attention.kv.weight, rows" in check.message or ".phi_" in check.message


class TurnsWindowValues(GatheredBackend):
    """The values of the window are rotated like its keys."""

    def sliding(
        self, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGE: torch.Tensor, geometry, packing
    ):
        rotary = Rotary(RopeConfig(), v_NGE.shape[-1])
        turned = rotate(v_NGE, rotary.tables(packing.position_N))
        return super().sliding(q_NHD, k_NGD, turned, geometry, packing)


def test_window_values_that_are_rotated_fail_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONFIG.model.head_dim_k == CONFIG.model.head_dim_v
    made = probing(monkeypatch, GatheredBackend())
    assert found(made.layer()) == {"parity.layer": "pass"}
    monkeypatch.setattr(probes, "GatheredBackend", TurnsWindowValues)
    made = probing(monkeypatch, TurnsWindowValues())
    (check,) = made.layer()
    assert check.status == "fail"
    assert float(check.measured.split()[0]) > 0.1


class SwapsPairs(OneOperator):
    """One operator for all branches that takes the window's pair for the chosen one's."""

    def attend(
        self,
        q_NHD: torch.Tensor,
        compressed,
        selected,
        sliding,
        gate_NH3: torch.Tensor,
        geometry,
        packing,
    ):
        return super().attend(q_NHD, compressed, sliding, selected, gate_NH3, geometry, packing)


def test_a_fused_operator_with_its_branches_swapped_fails_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(probing(monkeypatch, SwapsPairs()).layer()) == {"parity.layer": "fail"}


@pytest.mark.parametrize("phi", ["avg", "linear", "mlp"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "dense"},
        {"gate": {"kind": "softmax", "per": "group", "temperature": 0.7}},
        {"gate": {"kind": "mlp"}},
        {"rope": RopeConfig(scaling="yarn", scale=4, trained_context=8)},
    ],
    ids=str,
)
def test_the_written_out_layer_is_that_of_every_kind_of_model(phi: str, changes) -> None:
    config = small_config(nsa={"phi": phi, "num_selected": 4}, **changes)
    model = small_model(config)
    x = torch.randn(41, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = expected_attention(model, x)
    torch.testing.assert_close(
        run_attention(model, x, Packing.uniform(1, 41))
        if config.attention == "nsa"
        else _dense(model, x),
        out, rtol=0, atol=1e-4,
    )  # fmt: skip


def _dense(model, x):
    from nsa_core.checks.layer import _attention

    return _attention(model, x)


def test_an_output_of_nan_fails_the_layer() -> None:
    model = LanguageModel(small_config(), seed=1)
    with torch.no_grad():
        model.block_list[0].attention.out.weight[0, 0] = torch.nan
    result = layer_probe(
        model, LanguageModel(small_config(), seed=1), num_tokens=20,
        autocast=torch.autocast("cpu", enabled=False),
    )  # fmt: skip
    assert not result.kernels <= 1.0
    assert result.exact <= 1e-4


@pytest.mark.parametrize("config", [CONFIG, FOUR_STRIDES], ids=["two strides", "four strides"])
def test_decode_goes_beyond_the_tokens_that_take_every_block(
    monkeypatch: pytest.MonkeyPatch, config
) -> None:
    made = probing(monkeypatch, GatheredBackend(), config=config)
    assert found(made.decode()) == {"decode.prefill": "pass"}
    monkeypatch.setattr(
        step_kernels,
        "choose_blocks",
        lambda score, position, geometry: choose_blocks(score * 0, position, geometry),
    )
    assert found(made.decode()) == {"decode.prefill": "fail"}


@pytest.mark.parametrize(("error", "is_close"), [(0.9e-5, True), (1.1e-5, False), (nan, False)])
def test_an_error_is_close_only_as_a_number_within_the_limit(error, is_close: bool) -> None:
    assert Parity("sliding", "sdpa", error, "dq", 1e-5).is_close is is_close
