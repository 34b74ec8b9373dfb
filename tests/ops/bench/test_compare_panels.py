"""A comparison is drawn as loss against tokens, and bits per byte where there are two."""

from pathlib import Path

import pytest

from nsa_core.rundir.bench_result import parse_bench_result
from nsa_ops.bench.panels import panels_of
from tests.ops.bench.results import document
from tests.ops.cli_case import CommandLine


def row(attention: str, validation):
    return {
        "attention": attention,
        "tokens_per_step": 100,
        "loss_curve": [[1, 100, 9.0], [2, 200, float("inf")], [3, 300, 5.0]],
        "validation": validation,
    }


def panels(*validation):
    rows = [row("nsa", validation), row("dense", validation)]
    return panels_of(parse_bench_result(document(rows, bench="compare"), "test")).panels


def test_the_loss_of_both_runs_is_drawn_against_tokens_without_what_is_not_finite() -> None:
    (loss,) = panels([3, 4.0, 1.5])
    assert loss.x_label == "tokens seen"
    assert [line.css for line in loss.lines] == ["s2", "s1"]  # dense is behind NSA
    assert {line.label: line.points for line in loss.lines} == {
        "dense": ((100.0, 9.0), (300.0, 5.0)),
        "NSA": ((100.0, 9.0), (300.0, 5.0)),
    }


def test_a_long_curve_is_drawn_by_the_means_of_growing_stretches() -> None:
    rows = [row("nsa", [[3, 4.0, 1.5]]) | {"loss_curve": [[n, n, float(n)] for n in range(1, 101)]}]
    (loss,) = panels_of(parse_bench_result(document(rows, bench="compare"), "test")).panels
    points = loss.lines[0].points
    assert points[:3] == ((1.0, 1.0), (3.0, 2.5), (6.0, 5.0))
    assert points[-1][0] == 100.0
    assert len(points) < 12


def test_settings_that_were_tried_are_drawn_over_the_base_under_their_names() -> None:
    names = ("runtime.half_residual=true", "base", "optimizer.learning_rate=0.001", "nsa")
    rows = [row("nsa", [[3, 4.0, 1.5]]) | {"name": name} for name in names]
    drawn = panels_of(parse_bench_result(document(rows, bench="compare"), "test"))
    assert [(line.label, line.css) for line in drawn.panels[0].lines] == [
        ("base", "s2"), ("half_residual=t…", "s1"), ("learning_rate=0…", "s3"), ("NSA", "s4"),
    ]  # fmt: skip
    assert drawn.title.startswith("One recipe, with settings and without")


@pytest.mark.parametrize(
    "lie", [{"name": ["base"]}, {"name": None}, {"loss_curve": [[1, "x", 2.0]]}], ids=str
)
def test_rows_that_no_bench_writes_are_refused_in_one_line(
    cli: CommandLine, tmp_path: Path, lie
) -> None:
    path = tmp_path / "result.json"
    path.write_text(document([row("nsa", [[3, 4.0, 1.5]]) | lie], bench="compare"))
    outcome = cli("bench", "compare", "--from", str(path), "--plot", str(tmp_path / "x.svg"))
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert "are not those of `bench compare`" in outcome.err
    assert not (tmp_path / "x.svg").exists()


def test_a_name_of_any_length_takes_no_more_than_its_place() -> None:
    rows = [row("nsa", [[3, 4.0, 1.5]]) | {"name": "x" * 3_000_000}]
    (loss,) = panels_of(parse_bench_result(document(rows, bench="compare"), "test")).panels
    assert len(loss.lines[0].label) == 16


def test_bits_per_byte_are_a_line_once_there_are_two() -> None:
    _, held_out = panels([1, 9.0, 3.0], [3, 4.0, 1.5])
    assert held_out.unit == "bits per byte"
    assert held_out.lines[0].points == ((100.0, 3.0), (300.0, 1.5))
