"""Draw line and area charts as inline SVG: axes with units, hover readings, no script, no colours.

Colours, fonts and dark mode come from classes in the page's style sheet. The hover reading of a
chart is plain CSS: every column of the plot holds a cursor, shown while the pointer is in it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from nsa_ops.quantities import format_count, format_number
from nsa_ops.report.axes import (
    Box,
    Scale,
    escape,
    finite_range,
    inner_ticks,
    nice_ticks,
    place_label,
    thin,
)

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 262
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 26, 38
MAX_POINTS = 600
MAX_READINGS = 60


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        points: (x, y) in order of x; a NaN breaks the line and is marked.
        css: Class that colours it: `s1` to `s4`, or `faint` for raw data behind its trend.
        dots: Draw every point, for a few points that were measured rarely.
    """

    label: str
    points: Sequence[Point]
    css: str
    dots: bool = False


@dataclass(frozen=True)
class Marker:
    """A labelled line across the plot: a threshold (horizontal) or a moment (vertical)."""

    at: float
    label: str
    css: str


@dataclass(frozen=True)
class Chart:
    """What a line chart shows; `draw_chart` makes it SVG.

    Attributes:
        unit: Unit of the vertical axis, in words.
        series: Lines, the first one at the back.
        moments: Vertical rules, such as the step where an attempt began.
        stacked: Fill the series on top of one another; they share their x values.
    """

    title: str
    unit: str
    series: Sequence[Series]
    x_label: str = "step"
    thresholds: Sequence[Marker] = ()
    moments: Sequence[Marker] = ()
    y_low: float | None = None
    y_high: float | None = None
    stacked: bool = False
    format_y: Callable[[float], str] = field(default=format_number)

    @property
    def has_data(self) -> bool:
        """Whether a line can be drawn."""
        return any(math.isfinite(y) for line in self.series for _, y in line.points)


@dataclass(frozen=True)
class _Frame:
    """The plot area of one chart."""

    x: Scale
    y: Scale
    x_ticks: list[float]
    y_ticks: list[float]


def draw_chart(chart: Chart) -> str:
    """The SVG of a chart that has data."""
    if chart.stacked:
        chart = _stack(chart)
    frame = _frame(chart)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{chart.title}, {chart.unit}")}">',
        *_grid(chart, frame),
        *_moments(chart, frame),
        *(_areas(chart, frame) if chart.stacked else _lines(chart, frame)),
        *_thresholds(chart, frame),
        *_readings(chart, frame),
        "</svg>",
    ]
    return "".join(parts)


def _stack(chart: Chart) -> Chart:
    """The same chart with every series lying on the sum of those before it."""
    floor: dict[float, float] = {}
    stacked = []
    for line in chart.series:
        stride = math.ceil(len(line.points) / MAX_POINTS) or 1
        points = [(x, floor.get(x, 0.0) + y) for x, y in line.points[::stride] if math.isfinite(y)]
        floor.update(points)
        stacked.append(Series(line.label, points, line.css))
    return replace(chart, series=stacked)


def _frame(chart: Chart) -> _Frame:
    xs = finite_range(x for line in chart.series for x, _ in line.points) or (0.0, 1.0)
    ys = finite_range(y for line in chart.series for _, y in line.points) or (0.0, 1.0)
    low = min(ys[0], chart.y_low) if chart.y_low is not None else ys[0]
    high = max(ys[1], chart.y_high) if chart.y_high is not None else ys[1]
    y_ticks = nice_ticks(low, high, 6)
    x_low, x_high = xs if xs[1] > xs[0] else (xs[0] - 1, xs[0] + 1)
    return _Frame(
        x=Scale(x_low, x_high, LEFT, WIDTH - RIGHT),
        y=Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP),
        x_ticks=inner_ticks(x_low, x_high, 6),
        y_ticks=y_ticks,
    )


def _text(x: float, y: float, css: str, content: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}">{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{css}"/>'


def _grid(chart: Chart, frame: _Frame) -> list[str]:
    parts = [_text(LEFT, 12, "unit", chart.unit)]
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        parts.append(_text(LEFT - 8, y + 4, "tick end", chart.format_y(tick)))
    for tick in frame.x_ticks:
        x = frame.x(tick)
        parts.append(_line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 4, "axis"))
        parts.append(_text(x, HEIGHT - BOTTOM + 17, "tick middle", format_count(tick)))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 5, "unit middle", chart.x_label))
    return parts


def _moments(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    for moment in chart.moments:
        if not frame.x.low <= moment.at <= frame.x.high:
            continue
        x = frame.x(moment.at)
        title = f"<title>{escape(moment.label)} at step {moment.at:.0f}</title>"
        parts.append(f"<g>{_line(x, TOP, x, HEIGHT - BOTTOM, f'moment {moment.css}')}{title}</g>")
    return parts


def _thresholds(chart: Chart, frame: _Frame) -> list[str]:
    """Each threshold with its label, placed where no line, threshold or other label is."""
    shown = [rule for rule in chart.thresholds if frame.y.low <= rule.at <= frame.y.high]
    plot = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    lines = [piece for line in chart.series for piece in _unbroken(line.points, frame)]
    taken = [Box(LEFT, frame.y(rule.at), WIDTH - RIGHT, frame.y(rule.at)) for rule in shown]
    parts = []
    for rule in shown:
        y = frame.y(rule.at)
        place = place_label(rule.label, y, plot, lines, taken)
        taken.append(place.box)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, f"threshold {rule.css}"))
        parts.append(_text(place.right, place.baseline, f"note end {rule.css}", rule.label))
    return parts


def _unbroken(points: Sequence[Point], frame: _Frame) -> list[list[Point]]:
    """Pixels of the pieces of a line between values that are not finite."""
    groups = groupby(thin(points, MAX_POINTS), key=lambda point: math.isfinite(point[1]))
    return [[(frame.x(x), frame.y(y)) for x, y in group] for is_drawn, group in groups if is_drawn]


def _path(points: Sequence[Point], frame: _Frame) -> str:
    """Path data that lifts the pen at a value that is not finite."""
    pieces = []
    pen = "M"
    for x, y in points:
        if math.isfinite(y):
            pieces.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(pieces)


def _lines(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    for line in chart.series:
        points = thin(line.points, MAX_POINTS)
        parts.append(f'<path d="{_path(points, frame)}" class="line {line.css}"/>')
        dots = points if line.dots or len(points) == 1 else []
        parts.extend(_dot(frame, x, y, line.css) for x, y in dots if math.isfinite(y))
        parts.extend(_broken(frame, x, line.label) for x, y in points if not math.isfinite(y))
    return parts


def _dot(frame: _Frame, x: float, y: float, css: str) -> str:
    return f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" class="dot {css}"/>'


def _broken(frame: _Frame, x: float, label: str) -> str:
    """A cross at the top of the plot where a value was not finite."""
    at, top = frame.x(x), TOP + 6
    cross = f"M{at - 4:.1f} {top - 4}l8 8m0 -8l-8 8"
    title = f"<title>{escape(label)} is not finite at step {x:.0f}</title>"
    return f'<g><path d="{cross}" class="broken"/>{title}</g>'


def _areas(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    below: list[Point] = []
    for line in chart.series:
        points = list(line.points)
        if not points:
            continue
        floor = below or [(points[0][0], frame.y.low), (points[-1][0], frame.y.low)]
        outline = _path(points, frame) + _path(floor[::-1], frame).replace("M", "L", 1) + "Z"
        parts.append(f'<path d="{outline}" class="area {line.css}"/>')
        parts.append(f'<path d="{_path(points, frame)}" class="line {line.css}"/>')
        below = points
    return parts


def _readings(chart: Chart, frame: _Frame) -> list[str]:
    """One column a reading: an invisible area, and the cursor it shows under the pointer."""
    xs = sorted({x for line in chart.series for x, _ in line.points})
    chosen = xs[:: math.ceil(len(xs) / MAX_READINGS)] if xs else []
    if chosen and chosen[-1] != xs[-1]:
        chosen[-1] = xs[-1]
    values = [dict(line.points) for line in chart.series]
    edges = _edges([frame.x(x) for x in chosen])
    return [
        _reading(chart, frame, x, [known.get(x) for known in values], edges[index : index + 2])
        for index, x in enumerate(chosen)
    ]


def _edges(pixels: Sequence[float]) -> list[float]:
    """Borders half-way between neighbours, the plot's own at both ends."""
    between = [(left + right) / 2 for left, right in pairwise(pixels)]
    return [float(LEFT), *between, float(WIDTH - RIGHT)]


def _reading(
    chart: Chart, frame: _Frame, x: float, values: Sequence[float | None], edge: Sequence[float]
) -> str:
    at = frame.x(x)
    shown = [
        (line, value) for line, value in zip(chart.series, values, strict=True) if value is not None
    ]
    readings = [
        f"{line.label} {chart.format_y(value - below)}"
        for (line, value), below in zip(shown, _floors(chart, shown), strict=True)
    ]
    text = escape(f"{chart.x_label} {x:.0f}: " + ", ".join(readings))
    dots = "".join(_dot(frame, x, value, line.css) for line, value in shown if math.isfinite(value))
    return (
        f'<g class="reading"><rect x="{edge[0]:.1f}" y="{TOP}" width="{edge[1] - edge[0]:.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}"><title>{text}</title></rect><g>'
        f"{_line(at, TOP, at, HEIGHT - BOTTOM, 'cursor')}{dots}"
        f'<text x="{WIDTH - RIGHT}" y="12" class="shown end">{text}</text></g></g>'
    )


def _floors(chart: Chart, shown: Sequence[tuple[Series, float]]) -> list[float]:
    """What lies under each value of a stacked chart, so that a reading shows the share itself."""
    if not chart.stacked:
        return [0.0] * len(shown)
    return [0.0, *(value for _, value in shown[:-1])]
