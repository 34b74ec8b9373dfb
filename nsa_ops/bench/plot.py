"""Draw panels with logarithmic axes as one self-contained SVG file; pure."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_ops.bench.panels import Panel, Panels, PlotLine
from nsa_ops.report.axes import Scale, escape

#: Pixels. The right margin holds the names of the lines, which end there.
WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 50, 118, 40, 42
HEAD, EDGE, LINE_HEIGHT, LETTER = 48, 12, 16, 6.6
COLUMNS = 2
LABEL_HEIGHT = 13.0
#: What the name of a tick takes.
TICK_WIDTH = 40.0

#: The colours of the report, in light and in dark.
STYLE = """
svg { --card: #ffffff; --ink: #1d2025; --soft: #666c76; --line: #dfe1e4; --grid: #ecedef;
  --s1: #2461c4; --s2: #d3650a; --s3: #0b8a68; --s4: #8a4fc7; --s5: #b0356b; --floor: #6d737d; }
@media (prefers-color-scheme: dark) { svg { --card: #191c21; --ink: #e7e9ec; --soft: #9aa1ac;
  --line: #31363e; --grid: #262a31; --s1: #79acff; --s2: #ffa657; --s3: #4fcfa6; --s4: #c7a1ff;
  --s5: #ff8fbc; --floor: #98a0ab; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
.page { fill: var(--card); }
.title { font-size: 17px; font-weight: 650; fill: var(--ink); }
.name { font-size: 13.5px; font-weight: 620; fill: var(--ink); }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.tie { stroke-width: 1; opacity: 0.5; }
path { fill: none; } .line { stroke-width: 2.4; stroke-linejoin: round; }
.line.thin { stroke-width: 1.3; } .line.floor { stroke-dasharray: 5 4; stroke-width: 1.6; }
.label { font-weight: 600; } .label.thin { font-weight: 400; }
""" + "".join(
    f"path.{css} {{ stroke: var(--{css}); }} .dot.{css}, .label.{css} {{ fill: var(--{css}); }}\n"
    for css in ("s1", "s2", "s3", "s4", "s5", "floor")
)


def draw_panels(panels: Panels) -> str:
    """The SVG document: the same bytes for the same numbers."""
    columns = min(COLUMNS, len(panels.panels))
    rows = math.ceil(len(panels.panels) / columns)
    width = columns * WIDTH + 2 * EDGE
    remark = textwrap.wrap(panels.remark, int((width - 2 * EDGE) / LETTER))
    head = HEAD + LINE_HEIGHT * len(remark)
    height = head + rows * HEIGHT + EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(panels.title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        _text(EDGE + 8, 28, "title", panels.title),
        *(_text(EDGE + 8, HEAD + LINE_HEIGHT * row, "", said) for row, said in enumerate(remark)),
    ]
    for index, panel in enumerate(panels.panels):
        x, y = EDGE + index % columns * WIDTH, head + index // columns * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{draw_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Axes:
    """Logarithmic scales of one panel and the values that are ticked."""

    x: Scale
    y: Scale
    x_ticks: list[float]
    y_ticks: list[float]

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        """Pixel of a point."""
        return self.x(math.log(point[0])), self.y(math.log(point[1]))


def _axes(lines: Sequence[PlotLine]) -> _Axes:
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = xs[0], xs[-1]
    if low == high:
        low, high = low / 2, high * 2
    ticks = decade_ticks(min(ys), max(ys))
    x = Scale(math.log(low), math.log(high), LEFT, WIDTH - RIGHT)
    return _Axes(
        x=x,
        y=Scale(math.log(ticks[0]), math.log(ticks[-1]), HEIGHT - BOTTOM, TOP),
        x_ticks=readable_ticks(xs, x),
        y_ticks=ticks,
    )


def readable_ticks(values: Sequence[float], scale: Scale) -> list[float]:
    """Values whose names do not run into each other; ascending, and the last one is kept."""
    kept: list[float] = []
    for value in reversed(values):
        if not kept or scale(math.log(kept[-1])) - scale(math.log(value)) >= TICK_WIDTH:
            kept.append(value)
    return kept[::-1]


def decade_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that hold a range, from at or below to at or above it."""
    ticks: list[float] = []
    power = math.floor(math.log10(low))
    while not ticks or ticks[-1] <= high:
        ticks += [factor * 10.0**power for factor in (1, 2, 5)]
        power += 1
    below = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    above = min(index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return ticks[below : max(above, below + 1) + 1]


def draw_panel(panel: Panel) -> str:
    """One pair of axes with its lines and their names at the right."""
    axes = _axes(panel.lines)
    parts = [_text(8, 16, "name", panel.title), _text(LEFT, TOP - 8, "", panel.unit)]
    parts += _grid(panel, axes)
    parts += [_draw_line(line, axes, panel.unit) for line in panel.lines]
    parts += _labels(panel.lines, axes)
    return "".join(parts)


def _grid(panel: Panel, axes: _Axes) -> list[str]:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in axes.y_ticks:
        y = axes.y(math.log(tick))
        parts.append(_path(f"M{LEFT} {y:.1f}H{right}", "grid"))
        parts.append(_text(LEFT - 7, y + 4, "end", f"{tick:,g}"))
    for tick in axes.x_ticks:
        x = axes.x(math.log(tick))
        parts.append(_path(f"M{x:.1f} {TOP}V{floor + 4}", "grid"))
        parts.append(_text(x, floor + 18, "middle", tokens_text(tick)))
    parts.append(_path(f"M{LEFT} {floor}H{right}", "axis"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 7, "middle", panel.x_label))
    return parts


def tokens_text(tokens: float) -> str:
    """`512`, `2k`, `64k`: in units of 1,024, as lengths are spoken of; `20.1M` of a whole run."""
    if tokens >= 1e6 and not math.log2(tokens).is_integer():
        return f"{tokens / 1e6:.3g}M"
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def _draw_line(line: PlotLine, axes: _Axes, unit: str) -> str:
    pixels = [axes.at(point) for point in line.points]
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
    dots = "".join(
        f'<circle class="dot {line.css}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>'
        f"{escape(f'{line.label}, {tokens_text(point[0])} tokens: {point[1]:.4g} {unit}')}"
        "</title></circle>"
        for (x, y), point in zip(pixels, line.points, strict=True)
        if "floor" not in line.css
    )
    return _path(f"M{steps}", f"line {line.css}") + dots


def _labels(lines: Sequence[PlotLine], axes: _Axes) -> list[str]:
    """Every line's name beside its end; names that would meet are moved apart."""
    ends = sorted(((axes.at(line.points[-1])[1], line) for line in lines), key=lambda pair: pair[0])
    heights = spread_apart([y for y, _ in ends], LABEL_HEIGHT, TOP, HEIGHT - BOTTOM)
    parts = []
    for (end, line), height in zip(ends, heights, strict=True):
        x = axes.at(line.points[-1])[0]
        tie = f"M{x + 4:.1f} {end:.1f}L{WIDTH - RIGHT + 10} {height:.1f}"
        parts.append(_path(tie, f"tie {line.css.split()[0]}"))
        parts.append(_text(WIDTH - RIGHT + 13, height + 4, f"label {line.css}", line.label))
    return parts


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, at least `gap` apart, in the same order, within the range."""
    placed: list[float] = []
    for want in wanted:
        placed.append(max(want, placed[-1] + gap) if placed else max(want, low))
    limit = high
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed


def _text(x: float, y: float, css: str, content: str) -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(content)}</text>'


def _path(data: str, css: str) -> str:
    return f'<path d="{data}" class="{css}"/>'
