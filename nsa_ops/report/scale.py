"""Axes: round tick values that cover a range, and the mapping from values to pixels."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_TREND = 400
#: A range this small beside its values, or below what a step can divide, is drawn as one value.
_FLAT = 1e-12
_SMALLEST = 1e-300


@dataclass(frozen=True)
class Scale:
    """A linear mapping from [low, high] to [start_px, end_px]; `end_px` may be the smaller one."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start_px + share * (self.end_px - self.start_px)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values that cover the range; the first and last lie at or outside it."""
    if high - low <= max(abs(low), abs(high)) * _FLAT + _SMALLEST:
        padding = abs(low) * 0.1 or 1.0
        low, high = low - padding, high + padding
    step = _nice_step((high - low) / max(1, count - 1))
    first = math.floor(low / step + 1e-6)
    last = math.ceil(high / step - 1e-6)
    return [index * step for index in range(first, last + 1)]


def inner_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round values inside the range, for an axis that ends where its data end."""
    slack = (high - low) * 1e-6
    return [tick for tick in nice_ticks(low, high, count) if low - slack <= tick <= high + slack]


def _nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten that is at least this large."""
    power = float(10.0 ** math.floor(math.log10(rough)))
    for factor in (1.0, 2.0, 2.5, 5.0):
        if rough <= factor * power * (1 + 1e-9):
            return factor * power
    return 10 * power


def finite_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Smallest and largest finite value; None without one."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most about `limit` points that keep every bucket's lowest and highest value.

    A spike of one step stays visible in a run of a hundred thousand, and so does a NaN.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit / 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        kept.extend(_extremes(points[start : start + size]))
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _extremes(bucket: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    broken = [point for point in bucket if not math.isfinite(point[1])]
    if broken:
        return broken[:1]
    lowest = min(bucket, key=lambda point: point[1])
    highest = max(bucket, key=lambda point: point[1])
    return sorted({lowest, highest})


def running_median(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """The trend, unmoved by single spikes: medians of `width` points, at most `MAX_TREND` of them.

    They lie at regular intervals, the last point among them.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    half = width // 2
    stride = math.ceil(len(finite) / MAX_TREND) or 1
    trend = []
    for index in sorted({*range(0, len(finite), stride), *range(len(finite))[-1:]}):
        around = [y for _, y in finite[max(0, index - half) : index + half + 1]]
        trend.append((finite[index][0], statistics.median_low(around)))
    return trend
