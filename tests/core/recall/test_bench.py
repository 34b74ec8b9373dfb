"""The recall bench judges by the bars of the specification and shows both models."""

from dataclasses import replace

import pytest
import torch

from nsa_core.bench.__main__ import load_bench, main, parse_arguments
from nsa_core.recall import bench as recall
from nsa_core.recall import learning
from nsa_core.recall.bench import TABLE, RecallRow, judge, teach_and_judge
from nsa_core.recall.learning import as_dense
from tests.core.recall.test_learning import LONG, short_recipe

NSA = RecallRow("nsa", 3, 150, 0.97, 0.2, 0.25, 0.0625, 1008, 625, 90.0, "sdpa")
DENSE = replace(NSA, attention="dense", accuracy=0.4, without_selection=None, without_choice=None)


def test_a_model_that_meets_both_bars_passes_and_the_control_has_none() -> None:
    assert judge([NSA, DENSE]) is None
    assert judge([replace(NSA, accuracy=0.95, without_selection=0.5)]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"accuracy": 0.949}, "nsa, seed 3, 150 tokens: 94.9 % of the answers are right"),
        ({"without_selection": 0.51}, "51.0 % are right without the selected branch"),
    ],
)
def test_a_missed_bar_is_named_with_its_value(change: dict[str, float], says: str) -> None:
    assert says in judge([DENSE, NSA, replace(NSA, **change)])


def test_a_line_is_aligned_with_its_header_and_the_control_has_nothing_to_cut() -> None:
    assert "97.0 %" in TABLE.line(NSA)
    assert TABLE.line(DENSE).split()[:6] == ["dense", "3", "150", "40.0", "%", "n/a"]
    assert len(TABLE.line(NSA)) - len("sdpa") == TABLE.header.index("backend")


def test_both_models_are_taught_the_same_and_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall.LEAST_QUERIES == 1000
    monkeypatch.setattr(recall, "LEAST_QUERIES", 50)
    monkeypatch.setattr(learning, "MEASURED_QUERIES", 16)
    recipe = short_recipe()
    (nsa,) = teach_and_judge(recipe, torch.device("cpu"))
    (dense,) = teach_and_judge(as_dense(recipe), torch.device("cpu"))
    assert (nsa.attention, dense.attention) == ("nsa", "dense")
    assert (nsa.steps, dense.steps) == (5, 5)
    assert nsa.num_queries == dense.num_queries >= 50
    assert nsa.seq_len == LONG.seq_len
    assert dense.without_selection is None
    assert nsa.without_selection is not None


def test_a_seed_that_cannot_be_used_is_one_line_before_the_first_is_learned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "teach_and_judge", None)
    assert main(["recall", "--device", "cpu", "--seeds", "0", "-1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: the seed of a recipe must be 0 or more and below 1,000,000, not -1\n"


def test_seeds_and_device_are_flags_and_a_card_that_is_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse_arguments(["--seeds", "1", "2", "--device", "cpu"], "r", load_bench("recall"))
    assert (options.seeds, options.device) == ([1, 2], "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["recall", "--device", "cuda"]) == 2
    assert "torch sees no CUDA card" in capsys.readouterr().err
