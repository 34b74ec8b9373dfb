"""The performance-validation matrix on a CPU: a few real steps, and a judgement that can fail."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Never

import pytest
import torch

from nsa_core.bench import __main__ as entry
from nsa_core.bench import validate
from nsa_core.bench.validate import (
    PATHS,
    TABLE,
    SelectionPath,
    ValidationRequest,
    cell_config,
    failure,
    measure_cells,
    on_path,
    paths_on,
    spread_of_runs,
    with_gaps,
)
from nsa_core.config.recipe import resolve
from nsa_core.kernels.backend import BranchBackends, DeviceFacts
from nsa_core.kernels.gathered_backend import GatheredBackend

SMALL = [
    "model.dim=32", "model.head_dim_k=16", "model.head_dim_v=16", "model.num_layers=1",
    "model.mlp_width=32", "data.source=synthetic", "data.max_tokens=60000", "batch.seq_len=64",
    "batch.micro_batch=4", "runtime.threads=1",
]  # fmt: skip
CONFIG = resolve("tiny-cpu", "cpu", SMALL).config


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def rows(root):
    request = ValidationRequest(CONFIG, lengths=(32, 96), steps=3, root=root)
    return list(measure_cells(request))


def test_every_path_of_this_machine_is_run_at_every_length(rows) -> None:
    assert [(row.path, row.T) for row in rows] == [
        ("sdpa-masked", 32), ("sdpa-gathered", 32), ("sdpa-masked", 96), ("sdpa-gathered", 96),
    ]  # fmt: skip
    for row in rows:
        assert (row.steps, row.outcome) == (3, "ok")
        assert row.tokens_per_s > 0
        assert row.kernels["selected"] == row.path
        assert row.kernels["compressed"] == "sdpa"


def test_the_paths_train_alike_and_train_at_all(rows) -> None:
    assert failure(rows) is None
    for row in rows:
        assert row.first_loss_gap < 1e-5
        assert row.final_loss < row.first_loss


def test_a_step_has_the_tokens_of_the_micro_batch_at_every_length() -> None:
    request = ValidationRequest(CONFIG, lengths=(32, 128, 1024))
    assert [cell_config(request, length).batch.micro_batch for length in request.lengths] == [
        8,
        2,
        1,
    ]
    assert cell_config(request, 32).batch.tokens_per_step == 256


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


def test_a_path_with_a_planted_fault_fails_the_matrix(
    monkeypatch: pytest.MonkeyPatch, root
) -> None:
    faulty = SelectionPath("sdpa", DropsTheCurrentBlock)
    monkeypatch.setattr(validate, "PATHS", {**PATHS, "sdpa-gathered": faulty})
    request = ValidationRequest(CONFIG, lengths=(64,), steps=2, root=root)
    found = list(measure_cells(request))
    assert "sdpa-gathered at 64 tokens: its first loss is" in failure(found)


def test_a_final_loss_that_drifts_or_is_nan_fails(rows) -> None:
    row = replace(rows[1], tokens=16_384)
    assert "its final loss" in failure([replace(row, final_loss_gap=0.021)])
    assert failure([replace(row, final_loss_gap=0.019)]) is None
    assert "nan nats" in failure([replace(row, final_loss_gap=float("nan"))])


def test_steps_of_fewer_tokens_may_drift_further_apart_and_longer_ones_no_less(rows) -> None:
    short, long = replace(rows[1], tokens=4096), replace(rows[1], tokens=65_536)
    assert failure([replace(short, final_loss_gap=0.039)]) is None
    assert "and 0.04 are allowed" in failure([replace(short, final_loss_gap=0.041)])
    assert "and 0.02 are allowed" in failure([replace(long, final_loss_gap=0.021)])


@pytest.mark.parametrize("loss", ["first_loss", "final_loss"])
@pytest.mark.parametrize("shift", [-0.03, 0.03], ids=["lower", "higher"])
def test_a_loss_beyond_the_limit_fails_on_either_side_of_the_first_path(
    rows, loss: str, shift: float
) -> None:
    first, other = (replace(row, tokens=16_384) for row in rows[:2])
    moved = replace(other, **{loss: getattr(first, loss) + shift})
    assert f"its {loss.replace('_', ' ')}" in failure([with_gaps(moved, first)])


def test_running_out_of_memory_is_a_row_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, root
) -> None:
    def small_card(*_) -> Never:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(validate, "make_learner", small_card)
    request = ValidationRequest(CONFIG, lengths=(32,), steps=1, paths=("sdpa-masked",), root=root)
    (row,) = measure_cells(request)
    assert (row.outcome, row.tokens_per_s) == ("out of memory", None)
    assert "n/a" in TABLE.line(row)
    assert with_gaps(row, None) == row


def test_paths_of_a_card_depend_on_its_architecture() -> None:
    new = paths_on(DeviceFacts("cuda", (9, 0), torch.bfloat16))
    old = paths_on(DeviceFacts("cuda", (7, 0), torch.float16))
    assert set(new.values()) == {None}
    assert [name for name, why in old.items() if why is None] == ["sdpa-masked", "sdpa-gathered"]
    assert "sm_70" in old["triton-items"]


@pytest.mark.parametrize(
    ("path", "says"), [("triton-items", "CUDA device"), ("fastest", "there is no such path")]
)
def test_a_named_path_that_does_not_exist_here_is_refused(path: str, says: str, root) -> None:
    request = ValidationRequest(CONFIG, lengths=(32,), steps=1, paths=(path,), root=root)
    with pytest.raises(ValueError, match=rf"--path {path}: .*{says}"):
        list(measure_cells(request))


def test_a_dense_model_has_nothing_to_validate() -> None:
    dense = CONFIG.model_copy(
        update={"model": CONFIG.model.model_copy(update={"attention": "dense"})}
    )
    with pytest.raises(ValueError, match="selects nothing"):
        ValidationRequest(dense)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--steps", "-2"), "--steps must be at least 1, got -2"),
        (("--length", "512", "--length", "1"), "--length must be at least 2, got 1"),
        (("--length", "100000000"), "--length must be at most 16,777,216, got 100,000,000"),
    ],
)
def test_sizes_that_train_nothing_are_one_line_that_names_the_one_flag(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], root
) -> None:
    assert entry.main(["validate", *words, "--root", str(root)]) == 2
    assert capsys.readouterr() == ("", f"error: {says}\n")


def test_the_spread_is_that_of_the_medians_of_three_runs() -> None:
    assert spread_of_runs([10, 10, 99, 20, 20, 1, 30, 30, 30]) == pytest.approx(20 / 20)
    assert spread_of_runs([5.0]) == 0.0


def test_the_command_reads_a_configuration_and_says_what_it_did_not_run(
    root, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(CONFIG.model_dump_json())
    words = ["--config", str(config), "--length", "32", "--steps", "2", "--root", str(root)]
    assert entry.main(["validate", *words, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [row["path"] for row in document["rows"]] == ["sdpa-masked", "sdpa-gathered"]
    assert "not run: triton-items: triton needs a CUDA device" in err
    assert (
        err.index("not run: ")
        < err.index(
            "training 2 steps on cpu for each of sdpa-masked, sdpa-gathered at 32 tokens; "
            f"the text is staged below {root / 'data'}\n"
        )
        < err.index("sdpa-masked   ")
    )
    assert str(root) not in document["command"]


def test_branches_on_the_backend_of_the_path_share_its_object() -> None:
    """Else an operator over all branches would be the one that was chosen, and not the path."""
    sdpa = GatheredBackend()
    chosen = BranchBackends.of(sdpa)
    on = on_path(chosen, "sdpa-gathered")
    assert on.compressed is on.selected is on.sliding
    assert on.selected is not sdpa
    others = replace(
        chosen, choices=tuple(replace(choice, name="flash") for choice in chosen.choices)
    )
    mixed = on_path(others, "sdpa-gathered")
    assert (mixed.compressed is sdpa, mixed.sliding is sdpa) == (True, True)
