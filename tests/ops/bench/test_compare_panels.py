"""A comparison is drawn as loss against tokens, and bits per byte where there are two."""

from nsa_core.rundir.bench_result import parse_bench_result
from nsa_ops.bench.panels import panels_of
from tests.ops.bench.results import document


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
    names = ("runtime.precision=bf16", "base", "optimizer.kind=muon")
    rows = [row("nsa", [[3, 4.0, 1.5]]) | {"name": name} for name in names]
    (loss,) = panels_of(parse_bench_result(document(rows, bench="compare"), "test")).panels
    assert [(line.label, line.css) for line in loss.lines] == [
        ("base", "s2"), ("runtime.precision=bf16", "s1"), ("optimizer.kind=muon", "s1"),
    ]  # fmt: skip


def test_bits_per_byte_are_a_line_once_there_are_two() -> None:
    _, held_out = panels([1, 9.0, 3.0], [3, 4.0, 1.5])
    assert held_out.unit == "bits per byte"
    assert held_out.lines[0].points == ((100.0, 3.0), (300.0, 1.5))
