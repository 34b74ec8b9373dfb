"""What a chart is made of: round ticks, value-to-pixel scales, places for labels, escaped text."""

import html
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nsa_ops.printable import printable, printable_lines

MAX_TREND = 400
#: A range this small beside its values, or below what a step can divide, is drawn as one value.
_FLAT = 1e-12
_SMALLEST = 1e-300
#: In pixels, for the 11 px font of `svg .note`; a little more than most letters need.
LETTER, ASCENT, DESCENT = 6.0, 10.0, 3.0
#: Between a label and the rule it belongs to.
GAP = 4.0
_MARGIN = 2.0
_SHIFTS = 8
Pixel = tuple[float, float]


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


@dataclass(frozen=True)
class Box:
    """An upright rectangle; `top` is the smaller y."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether the two have a point in common."""
        apart_x = self.right < other.left or other.right < self.left
        return not (apart_x or self.bottom < other.top or other.bottom < self.top)

    def is_crossed(self, start: Pixel, end: Pixel) -> bool:
        """Whether a straight line from `start` to `end`, which lies further right, enters it."""
        (x1, y1), (x2, y2) = start, end
        first, last = max(x1, self.left), min(x2, self.right)
        if first > last:
            return False
        slope = (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
        ys = sorted((y1 + slope * (first - x1), y1 + slope * (last - x1)))
        return ys[0] <= self.bottom and ys[1] >= self.top


@dataclass(frozen=True)
class LabelPlace:
    """Where a label's text ends on its right, its baseline, and the room it takes."""

    right: float
    baseline: float
    box: Box


def place_label(
    label: str, rule_y: float, plot: Box, lines: Sequence[Sequence[Pixel]], taken: Sequence[Box]
) -> LabelPlace:
    """The first free place along a rule, from the right: above it, then below it.

    `plot`: area that the label must not leave.
    `lines`: unbroken lines of the plot, each in order of x.
    `taken`: other labels and rules.

    Returns:
        Where it goes: at the right above the rule if no place is free.
    """
    places = list(_places(len(label) * LETTER, rule_y, plot))
    for place in places:
        is_free = not any(place.box.meets(other) for other in taken)
        if is_free and not any(_runs_through(line, place.box) for line in lines):
            return place
    return places[0]


def _places(width: float, rule_y: float, plot: Box) -> Iterator[LabelPlace]:
    """Every place to try, the usual one first."""
    slack = max(0.0, plot.right - plot.left - width)
    for index in range(_SHIFTS + 1):
        right = plot.right - slack * index / _SHIFTS
        for baseline in (rule_y - GAP, rule_y + ASCENT + GAP - DESCENT + _MARGIN):
            box = Box(
                right - width - _MARGIN, baseline - ASCENT, right + _MARGIN, baseline + DESCENT
            )
            if index == 0 or (box.top >= plot.top and box.bottom <= plot.bottom):
                yield LabelPlace(right, baseline, box)


def _runs_through(line: Sequence[Pixel], box: Box) -> bool:
    if len(line) == 1:
        return box.is_crossed(line[0], line[0])
    return any(box.is_crossed(start, end) for start, end in pairwise(line))


def escape(text: str) -> str:
    """Text as one line of HTML, also inside quotes of an attribute."""
    return html.escape(printable(text))


def escape_lines(text: str) -> str:
    """Text as lines of HTML, for `<pre>`."""
    return html.escape(printable_lines(text))
