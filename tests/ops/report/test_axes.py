"""Axes: round ticks that cover the data, and thinning that hides no spike."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsa_ops.report.axes import Scale, inner_ticks, nice_ticks, running_median, thin

SIZES = st.floats(-1e9, 1e9, allow_nan=False)


@given(SIZES, SIZES)
@example(0.0, 5e-324)
@example(1e9, 1e9 + 1.2e-7)
@example(-1e-310, 1e-310)
def test_ticks_cover_the_range_and_are_few(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high, 6)
    slack = max(1e-6, (high - low) * 1e-6, abs(high) * 1e-6)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9
    assert all(after > before for before, after in pairwise(ticks))


def test_ticks_are_round_numbers() -> None:
    assert nice_ticks(1.62, 5.81, 6) == [1, 2, 3, 4, 5, 6]
    assert nice_ticks(0, 0.0006, 4) == pytest.approx([0, 2e-4, 4e-4, 6e-4])


def test_inner_ticks_stay_inside_the_data() -> None:
    assert inner_ticks(13, 487, 6) == [100, 200, 300, 400]


def test_scale_maps_the_ends_to_the_pixels() -> None:
    scale = Scale(10, 20, 54, 546)
    assert (scale(10), scale(15), scale(20)) == (54, 300, 546)


def test_thinning_keeps_a_single_spike_and_a_single_nan() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[61_234] = (61_234.0, 9.0)
    points[77_777] = (77_777.0, math.nan)
    kept = thin(points, 600)
    assert len(kept) <= 660
    assert (61_234.0, 9.0) in kept
    assert any(math.isnan(y) for _, y in kept)
    assert kept[-1] == points[-1]


def test_the_running_median_is_not_moved_by_one_spike() -> None:
    points = [(float(step), 2.0) for step in range(50)]
    points[25] = (25.0, 900.0)
    assert {y for _, y in running_median(points, 5)} == {2.0}


def test_the_trend_of_a_long_run_is_short_and_reaches_its_end() -> None:
    points = [(float(step), float(step)) for step in range(50_001)]
    trend = running_median(points, 1667)
    assert len(trend) <= 402
    assert trend[-1][0] == 50_000.0
    assert all(x == y for x, y in trend[10:-10])


def test_nothing_finite_has_no_trend() -> None:
    assert running_median([(0.0, math.nan)] * 50, 5) == []
