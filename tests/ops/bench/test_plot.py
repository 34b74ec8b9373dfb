"""The picture of a result: what is drawn where, and that it stands alone."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from nsa_core.rundir.bench_result import parse_bench_result
from nsa_ops.bench.panels import panels_of
from nsa_ops.bench.plot import (
    TICK_WIDTH,
    decade_ticks,
    draw_panels,
    readable_ticks,
    spread_apart,
    tokens_text,
)
from nsa_ops.report.axes import Scale
from tests.ops.bench.results import LONG_ROW, ROW, document


def drawn(*rows: dict[str, object], **changes: object) -> str:
    return draw_panels(panels_of(parse_bench_result(document(list(rows), **changes), "test")))


def test_every_line_of_the_issue_is_in_the_panels_of_a_shape() -> None:
    result = parse_bench_result(document([LONG_ROW, ROW]), "test")
    panels = panels_of(result).panels
    assert [panel.title for panel in panels] == ["Shape A, forward", "Shape A, forward + backward"]
    points = {line.label: line.points for line in panels[1].lines}
    assert points["NSA"] == ((2048.0, 4.6), (65536.0, 11.9))
    assert points["dense, cuDNN"] == ((2048.0, 2.3), (65536.0, 53.7))
    assert points["arithmetic floor"][0] == (2048.0, 1.2)
    assert points["selected"][0] == (2048.0, 2.6)
    assert set(points) == {
        "NSA", "compressed", "selected", "window", "dense, cuDNN", "dense, flash",
        "arithmetic floor",
    }  # fmt: skip


def test_equal_factors_are_equal_distances_on_both_axes() -> None:
    rows = [ROW | {"T": 1024 * 4**n, "fwd_bwd_ms": 1.5 * 10.0**n} for n in range(3)]
    picture = ElementTree.fromstring(drawn(*rows))
    dots = [
        (float(dot.attrib["cx"]), float(dot.attrib["cy"]))
        for dot in picture.iter("{http://www.w3.org/2000/svg}circle")
        if dot.attrib["class"] == "dot s1"
    ][3:]  # the second panel
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert x1 < x2
    assert y1 > y2


def test_the_picture_asks_nobody_and_says_what_it_was_measured_on() -> None:
    svg = drawn(ROW, LONG_ROW)
    addresses = set(re.findall(r"https?://[^\"' )]+", svg))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert "url(" not in svg
    for fact in ("NVIDIA T1000", "1755 MHz", "torch 2.13.0", "Triton 3.7.1", "commit c0ffeec0ffee"):
        assert fact in svg


def test_text_of_a_result_cannot_become_markup() -> None:
    svg = drawn(ROW, card="<script>alert(1)</script>")
    assert "<script>" not in svg
    ElementTree.fromstring(svg)


def test_a_figure_that_a_logarithm_does_not_know_is_left_out() -> None:
    rows = [ROW | {"T": 1024, "fwd_ms": None}, ROW | {"T": 4096, "fwd_ms": 0.0}, ROW]
    result = parse_bench_result(document(rows), "test")
    lines = {line.label: line.points for line in panels_of(result).panels[0].lines}
    assert lines["NSA"] == ((2048.0, 1.3),)
    assert len(lines["dense, cuDNN"]) == 3


def test_one_row_can_be_drawn() -> None:
    ElementTree.fromstring(drawn(ROW))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.3, 30, [0.2, 0.5, 1, 2, 5, 10, 20, 50]),
        (1, 10, [1, 2, 5, 10]),
        (3, 3, [2, 5]),
        (5, 5, [5, 10]),
    ],
)
def test_ticks_hold_the_range(low: float, high: float, ticks: list[float]) -> None:
    assert decade_ticks(low, high) == pytest.approx(ticks)


def test_names_are_moved_apart_and_keep_their_order_and_the_plot() -> None:
    placed = spread_apart([10.0, 11.0, 12.0, 95.0, 96.0], 13.0, 5.0, 100.0)
    assert all(after - before >= 13.0 for before, after in itertools.pairwise(placed))
    assert placed[0] == 10.0
    assert placed[-1] <= 100.0


def test_a_model_is_drawn_with_the_floor_of_each_attention() -> None:
    rows = [
        {"attention": name, "T": 2048, "tokens": 65536, "step_ms": 200.0,
         "train_flops_per_token": 7.4e8}
        for name in ("nsa", "dense")
    ]  # fmt: skip
    result = parse_bench_result(document(rows, bench="model"), "test")
    (panel,) = panels_of(result).panels
    points = {line.label: line.points for line in panel.lines}
    assert points["NSA"] == points["dense"] == ((2048.0, 200.0),)
    assert points["floor, NSA"][0][1] == pytest.approx(7.4e8 * 65536 / 7.4e12 * 1e3)


def test_decode_is_drawn_by_the_number_of_sequences() -> None:
    rows = [
        {"shape": "A", "T": length, "batch": batch, "nsa_ms": 0.02, "dense_cudnn_ms": 0.03,
         "dense_flash_ms": 0.04, "floor_ms": 0.001}
        for batch in (1, 16)
        for length in (8192, 65536)
    ]  # fmt: skip
    result = parse_bench_result(document(rows, bench="decode"), "test")
    panels = panels_of(result).panels
    assert [panel.title for panel in panels] == ["Shape A, 1 sequence", "Shape A, 16 sequences"]
    assert all(len(line.points) == 2 for panel in panels for line in panel.lines)
    ElementTree.fromstring(draw_panels(panels_of(result)))


def test_ranks_are_drawn_by_what_one_of_them_reaches() -> None:
    rows = [
        {"recipe": "m7c-125m", "T": length, "ranks": ranks, "sharding": sharding,
         "tokens_per_s": rate}
        for length in (2048, 65536)
        for ranks, sharding, rate in ((1, "none", 400e3), (2, "ddp", 780e3), (2, "fsdp", None))
    ]  # fmt: skip
    result = parse_bench_result(document(rows, bench="scale"), "test")
    (panel,) = panels_of(result).panels
    assert {line.label: line.points for line in panel.lines} == {
        "1 rank": ((2048.0, 400e3), (65536.0, 400e3)),
        "2 ranks, ddp": ((2048.0, 390e3), (65536.0, 390e3)),
    }
    ElementTree.fromstring(draw_panels(panels_of(result)))


def test_the_names_of_ticks_do_not_run_into_each_other_and_the_last_is_there() -> None:
    scale = Scale(math.log(192e3), math.log(20e6), 50, 402)
    seen = [196_608, 589_824, 9_792_000, 15_936_000, 19_584_000, 20_054_016]
    kept = readable_ticks(seen, scale)
    assert kept[-1] == seen[-1]
    assert len(kept) == 4
    pixels = [scale(math.log(value)) for value in kept]
    assert all(b - a >= TICK_WIDTH for a, b in itertools.pairwise(pixels))


@pytest.mark.parametrize(
    ("tokens", "text"), [(512, "512"), (65_536, "64k"), (20_054_016, "20.1M"), (3000, "3000")]
)
def test_lengths_and_tokens_of_a_run_are_named_as_they_are_spoken_of(
    tokens: int, text: str
) -> None:
    assert tokens_text(tokens) == text
