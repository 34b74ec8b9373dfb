import io
import json
import os
import subprocess
import sys

import pytest
import torch

from nsa_core.checks import probes
from nsa_core.checks.__main__ import main, parse_arguments
from nsa_core.config.recipe import resolve
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.flash import FlashBackend
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.mixing import gated_sum
from nsa_core.model.transformer import LanguageModel
from tests.core.kernels import flash_package

CONFIG = resolve("tiny-cpu", "cpu").config


def statuses(report):
    return {check.name: check.status for check in report.checks}


class SeesTheNextKey(GatheredBackend):
    """Each token's window begins one key later and ends one key later."""

    def sliding(
        self, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGE: torch.Tensor, geometry, packing
    ):
        return super().sliding(q_NHD, k_NGD.roll(-1, 0), v_NGE.roll(-1, 0), geometry, packing)


class DropsTheCurrentBlock(GatheredBackend):
    """The last chosen block of each token is left out."""

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        last = (ids_NGS >= 0).sum(-1, keepdim=True) - 1
        shorter = ids_NGS.scatter(-1, last.clamp(min=1), -1)
        return super().selected(q_NHD, k_NGD, v_NGE, shorter, geometry, packing)


class ChoosesTheOldest(GatheredBackend):
    """Takes the first blocks instead of the best ones; the forced ones stay."""

    def select(
        self, q_NHD: torch.Tensor, k_CGD: torch.Tensor, lse_NH: torch.Tensor, geometry, packing
    ):
        return super().select(q_NHD * 0, k_CGD, lse_NH, geometry, packing)


class DropsTheBlockBefore(GatheredBackend):
    """The block before the current one is not forced: block 1 takes its place."""

    def select(
        self, q_NHD: torch.Tensor, k_CGD: torch.Tensor, lse_NH: torch.Tensor, geometry, packing
    ):
        ids = super().select(q_NHD, k_CGD, lse_NH, geometry, packing)
        before = packing.position_N[:, None, None] // geometry.select_block - 1
        moved = torch.where((ids == before) & (before > 1), ids - 1, ids)
        return torch.where((ids[..., :1] == moved) & (moved > 0), ids, moved)


class SeesTheFutureOfLongDocuments(GatheredBackend):
    """Right as long as documents are short; then the keys are one row late."""

    def selected(
        self,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGE: torch.Tensor,
        ids_NGS: torch.Tensor,
        geometry,
        packing,
    ):
        if packing.max_seqlen > 8 * geometry.num_selected * geometry.select_block:
            k_NGD, v_NGE = k_NGD.roll(-1, 0), v_NGE.roll(-1, 0)
        return super().selected(q_NHD, k_NGD, v_NGE, ids_NGS, geometry, packing)


class TrainsNoCompressedKey(GatheredBackend):
    """No gradient flows into what phi made."""

    def compressed(
        self, q_NHD: torch.Tensor, k_CGD: torch.Tensor, v_CGE: torch.Tensor, geometry, packing
    ):
        return super().compressed(q_NHD, k_CGD.detach(), v_CGE.detach(), geometry, packing)


class OneOperator(GatheredBackend):
    """One operator for all branches."""

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
        out_cmp, lse_NH = self.compressed(q_NHD, *compressed, geometry, packing)
        ids_NGS = self.select(q_NHD, compressed[0], lse_NH, geometry, packing)
        branches = (
            out_cmp,
            self.selected(q_NHD, *selected, ids_NGS, geometry, packing),
            self.sliding(q_NHD, *sliding, geometry, packing),
        )
        return gated_sum(gate_NH3, branches), self.recorded(ids_NGS, packing)

    def recorded(self, ids_NGS: torch.Tensor, _packing) -> torch.Tensor:
        """The ids that it says it chose."""
        return ids_NGS


class RecordsOtherBlocks(OneOperator):
    """Right but for the ids that it says it chose."""

    def recorded(self, ids_NGS: torch.Tensor, _packing) -> torch.Tensor:
        return torch.zeros_like(ids_NGS)


def probing(monkeypatch: pytest.MonkeyPatch, backends, config=CONFIG):
    """The probes of a run on these backends, or on one for all branches."""
    if not isinstance(backends, BranchBackends):
        backends = BranchBackends.of(backends)
    monkeypatch.setattr(probes, "choose_backends", lambda *_: backends)
    return probes._Probes(config, "cpu", "quick")


def found(made, *names):
    """What these probes alone find, by the name of the check: a whole tier takes seconds."""
    return {check.name: check.status for name in names for check in getattr(made, name)()}


#: The window is shorter than a compressed block: rows of two windows hold none.
SHORT_WINDOW = resolve(
    "tiny-cpu",
    "cpu",
    sets=[
        "model.nsa.window=8", "model.nsa.compress_block=32", "model.nsa.compress_stride=16",
        "model.nsa.select_block=64",
    ],
).config  # fmt: skip


def test_the_product_passes_every_probe_on_this_machine() -> None:
    begun = []
    report = probes.run_probes(CONFIG, "cpu", "standard", begin=lambda *told: begun.append(told))
    assert begun[0] == (0, len(begun), "kernels")
    assert begun[-1] == (len(begun) - 1, len(begun), "sentinel")
    assert set(statuses(report).values()) == {"pass"}
    assert {"causality.perturbation", "causality.sentinel"} <= set(statuses(report))
    assert [name for name in statuses(report) if name.startswith("decode")] == ["decode.prefill"]
    assert report.verdict == "pass"


def test_the_product_passes_with_a_window_shorter_than_a_compressed_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes._Probes, "long_length", lambda made: made.reach() + 1)
    report = probes.run_probes(SHORT_WINDOW, "cpu", "quick")
    assert {check.name: check.message for check in report.checks if check.status != "pass"} == {}


@pytest.mark.parametrize("probe", ["perturbation", "decode", "_recorded_blocks"])
def test_rows_reach_beyond_the_first_compressed_blocks(
    monkeypatch: pytest.MonkeyPatch, probe: str
) -> None:
    seen = []

    class Watched(LanguageModel):
        def hidden(self, tokens_BT: torch.Tensor, packing=None):
            seen.append(tokens_BT.shape[1])
            return super().hidden(tokens_BT, packing)

    monkeypatch.setattr(probes, "LanguageModel", Watched)
    monkeypatch.setattr(probes._Probes, "long_length", lambda _: 1)
    made = probes._Probes(SHORT_WINDOW, "cpu", "quick")
    if probe == "_recorded_blocks":
        made._recorded_blocks(made.model())
    else:
        list(getattr(made, probe)())
    nsa = SHORT_WINDOW.model.nsa
    assert max(seen) > nsa.compress_block + 2 * nsa.compress_stride


def test_a_poor_choice_is_found_whatever_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made = probing(monkeypatch, ChoosesTheOldest(), SHORT_WINDOW)
    assert found(made, "choice") == {"parity.choice": "fail"}


def test_ids_of_blocks_that_were_not_chosen_fail_what_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probing(monkeypatch, RecordsOtherBlocks())
    checks = probes.run_probes(CONFIG, "cpu", "quick").checks
    failed = {check.name for check in checks if check.status != "pass"}
    assert failed == {"statistics", "parity.choice"}


def test_a_planted_view_of_the_next_token_fails_perturbation_and_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = found(probing(monkeypatch, SeesTheNextKey()), "parity", "perturbation")
    assert seen["causality.perturbation"] == "fail"
    assert seen["parity.sliding"] == "fail"


def test_a_dropped_block_fails_parity_and_stays_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = found(probing(monkeypatch, DropsTheCurrentBlock()), "parity", "perturbation")
    assert seen["parity.selected"] == "fail"
    assert seen["causality.perturbation"] == "pass"


def test_a_poor_choice_of_blocks_fails_by_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    made = probing(monkeypatch, ChoosesTheOldest())
    assert found(made, "choice") == {"parity.choice": "fail"}


def test_a_missing_forced_block_fails_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    made = probing(monkeypatch, DropsTheBlockBefore())
    assert found(made, "choice") == {"parity.choice": "fail"}


def test_a_leak_that_only_long_documents_have_fails_perturbation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = found(probing(monkeypatch, SeesTheFutureOfLongDocuments()), "parity", "perturbation")
    assert seen["parity.selected"] == "pass"
    assert seen["causality.perturbation"] == "fail"


def test_a_compression_that_is_not_trained_fails_by_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = probing(monkeypatch, TrainsNoCompressedKey())
    assert found(made, "gradients") == {"gradients.reach": "fail"}


def probe_command(*words, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "nsa_core.checks", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.integration
def test_the_command_reads_a_configuration_and_prints_one_json_report() -> None:
    done = probe_command(
        "--json", "--device", "cpu", "--tier", "quick", "--config", "-",
        stdin=CONFIG.model_dump_json(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {check["status"] for check in json.loads(done.stdout)["checks"]} == {"pass"}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "says"),
    [(("--device", "cuda"), "nvidia-smi"), (("--device", "cpu", "--config", "-"), "not a config")],
)
def test_the_command_answers_bad_input_with_one_line_and_exit_code_2(
    words: tuple[str, ...], says: str
) -> None:
    done = probe_command(*words, stdin="{}}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_each_branch_reports_its_backend_and_the_policy_that_a_launch_is_held_to() -> None:
    lines = list(probes._Probes(CONFIG, "cpu", "quick").kernels())
    assert [line.name for line in lines] == [
        "kernels.compressed", "kernels.selected", "kernels.sliding",
    ]  # fmt: skip
    for line in lines:
        assert line.measured == "sdpa"
        assert line.message == "named by the configuration (runtime.backend)"
        assert line.limit == "named: sdpa; fp32, widths 32/32"


def test_a_dense_model_is_compared_in_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = CONFIG.model_copy(
        update={"model": CONFIG.model.model_copy(update={"attention": "dense"})}
    )
    plain = GatheredBackend()
    faulty = BranchBackends(plain, plain, plain, dense=SeesTheNextKey())
    assert found(probing(monkeypatch, faulty, dense), "parity") == {"parity.dense": "fail"}


class OneKeyTooMany:
    """A flash-attn whose window is one key wider than asked for."""

    @staticmethod
    def flash_attn_varlen_func(*inputs, window_size: tuple[int, int] = (-1, -1), **options):
        left, right = window_size
        wider = (left + 1 if left >= 0 else left, right)
        return flash_package.flash_attn_varlen_func(*inputs, window_size=wider, **options)


@pytest.mark.parametrize(("package", "status"), [(flash_package, "pass"), (OneKeyTooMany, "fail")])
def test_flash_attn_is_held_against_the_reference_on_the_card_like_any_other(
    monkeypatch: pytest.MonkeyPatch, package, status: str
) -> None:
    flash, plain = FlashBackend(package, GatheredBackend()), GatheredBackend()
    made = probing(monkeypatch, BranchBackends(flash, plain, flash))
    seen = found(made, "parity")
    assert seen["parity.sliding"] == status
    assert seen["parity.compressed"] == "pass"
    if status == "pass":
        assert found(made, "perturbation") == {"causality.perturbation": "pass"}


def test_a_backend_that_cannot_run_here_ends_the_probes_with_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.model_copy(
        update={"runtime": CONFIG.runtime.model_copy(update={"backend_selected": "flash"})}
    )
    content = io.BytesIO(config.model_dump_json().encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content))
    assert main(["--device", "cpu", "--config", "-"]) == 2
    assert "flash cannot run the selected branch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "tier"), [([], "standard"), (["--full"], "full"), (["--tier", "quick"], "quick")]
)
def test_the_tier_is_standard_unless_another_one_is_named(words, tier: str) -> None:
    assert parse_arguments(words).tier == tier
