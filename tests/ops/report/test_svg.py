"""Charts: well-formed SVG whose lines, gaps, readings and escapes are where they should be."""

import math
import xml.etree.ElementTree as ET

from nsa_ops.report.svg import Chart, Marker, Series, draw_chart


def _parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def _of_class(root: ET.Element, tag: str, css: str) -> list[ET.Element]:
    return [one for one in root.iter(tag) if css in one.get("class", "").split()]


def _chart(points: list[tuple[float, float]], **changes: object) -> Chart:
    return Chart("Loss", "nats", [Series("loss", points, "s1")], **changes)  # type: ignore[arg-type]


def test_a_line_goes_through_its_points_from_edge_to_edge() -> None:
    root = _parse(draw_chart(_chart([(0, 6), (50, 3), (100, 0)])))
    (line,) = _of_class(root, "path", "line")
    assert line.get("d") == "M54.0 26.0L300.0 125.0L546.0 224.0"


def test_a_value_that_is_not_finite_breaks_the_line_and_is_marked() -> None:
    root = _parse(draw_chart(_chart([(0, 1), (1, 2), (2, math.nan), (3, 2), (4, 1)])))
    (line,) = _of_class(root, "path", "line")
    assert (line.get("d") or "").count("M") == 2
    assert len(_of_class(root, "path", "broken")) == 1
    assert "loss is not finite at step 2" in "".join(root.itertext())


def test_every_reading_says_its_step_and_value() -> None:
    root = _parse(draw_chart(_chart([(10, 5.25), (20, 4.5)])))
    titles = [title.text for title in root.iter("title")]
    assert titles == ["step 10: loss 5.25", "step 20: loss 4.5"]


def test_a_long_run_has_few_readings_and_its_last_step_among_them() -> None:
    points = [(float(step), 1.0 + step % 7) for step in range(50_000)]
    svg = draw_chart(_chart(points))
    titles = [title.text or "" for title in _parse(svg).iter("title")]
    assert len(titles) <= 61
    assert titles[-1].startswith("step 49999:")
    assert len(svg) < 60_000


def test_stacked_readings_tell_each_share_and_not_the_sum() -> None:
    series = [Series(name, [(1, share)], "s1") for name, share in (("a", 0.25), ("b", 0.75))]
    root = _parse(draw_chart(Chart("Gates", "share", series, stacked=True, y_low=0, y_high=1)))
    assert [title.text for title in root.iter("title")] == ["step 1: a 0.25, b 0.75"]


def test_a_threshold_outside_the_plot_is_not_drawn() -> None:
    rules = [Marker(1.5, "inside", "warn"), Marker(99, "outside", "bad")]
    text = "".join(_parse(draw_chart(_chart([(0, 1), (1, 2)], thresholds=rules))).itertext())
    assert "inside" in text
    assert "outside" not in text


def _label(svg: str) -> tuple[float, float]:
    """Where the text of the only threshold ends, and its baseline, in pixels."""
    (note,) = _of_class(_parse(svg), "text", "note")
    return float(note.get("x", "nan")), float(note.get("y", "nan"))


def test_the_label_of_a_threshold_is_at_the_right_above_it_if_that_is_free() -> None:
    rules = [Marker(0.5, "a mean below this halts", "bad")]
    chart = _chart([(0, 1), (100, 1)], thresholds=rules, y_low=0)
    assert _label(draw_chart(chart)) == (546.0, 121.0)


def test_the_label_of_a_threshold_goes_below_it_where_a_line_runs_above() -> None:
    rules = [Marker(0.5, "a mean below this halts", "bad")]
    chart = _chart([(0, 1), (50, 0.53), (100, 0.53)], thresholds=rules, y_low=0)
    x, y = _label(draw_chart(chart))
    assert x == 546.0
    assert y - 10 > 125.0


def test_the_label_of_a_threshold_gives_way_to_a_line_that_goes_around_its_rule() -> None:
    points = [(float(x), 1.0 if x < 50 else 0.5 + 0.1 * (-1) ** x) for x in range(101)]
    chart = _chart(points, thresholds=[Marker(0.5, "this halts", "bad")], y_low=0)
    x, _ = _label(draw_chart(chart))
    assert x < 300.0


def test_labels_of_neighbouring_thresholds_do_not_lie_on_each_other() -> None:
    rules = [Marker(0.5, "a mean below this warns", "warn"), Marker(0.48, "this halts", "bad")]
    root = _parse(draw_chart(_chart([(0, 1), (100, 1)], thresholds=rules, y_low=0)))
    above, below = [float(note.get("y", "nan")) for note in _of_class(root, "text", "note")]
    assert below - above > 13


def test_hostile_names_stay_text() -> None:
    hostile = '"><script>alert(1)</script>&'
    lines, moments = [Series(hostile, [(0, 1)], "s1")], [Marker(0, hostile, "")]
    chart = Chart(hostile, hostile, lines, moments=moments)
    svg = draw_chart(chart)
    assert "<script" not in svg
    assert hostile in "".join(_parse(svg).itertext())


def test_a_single_point_and_a_flat_line_can_be_drawn() -> None:
    assert len(_of_class(_parse(draw_chart(_chart([(5, 2)]))), "circle", "dot")) == 2
    assert _of_class(_parse(draw_chart(_chart([(5, 2), (9, 2)]))), "path", "line")


def test_a_chart_of_nothing_finite_has_no_data() -> None:
    assert not _chart([(1, math.nan)]).has_data
    assert not Chart("Loss", "nats", []).has_data
