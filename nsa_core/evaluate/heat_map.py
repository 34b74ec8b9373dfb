"""A heat map as one SVG file: squares with their numbers written in them, no colour alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, FONT_SIZE = 84, 40, 96, 64, 13
#: From nothing to everything: light to dark, so that it survives printing in grey.
PALE, DEEP = (239, 243, 250), (24, 78, 140)
_MARGIN = 16
#: Of a bold letter in most sans-serif fonts, at the widest on average.
_LETTER_WIDTH = 0.62 * FONT_SIZE


@dataclass(frozen=True)
class HeatMap:
    """What is drawn.

    Attributes:
        shares: By row and column, 0 to 1: how dark.
        labels: By row and column: what is written in the square.
    """

    title: str
    row_title: str
    column_title: str
    rows: Sequence[str]
    columns: Sequence[str]
    shares: Sequence[Sequence[float]]
    labels: Sequence[Sequence[str]]


def draw(heat_map: HeatMap) -> str:
    """The SVG document; pure, the same bytes for the same numbers."""
    squares = LEFT + CELL_WIDTH * len(heat_map.columns)
    width = max(squares, _MARGIN + round(_LETTER_WIDTH * len(heat_map.title))) + _MARGIN
    height = TOP + CELL_HEIGHT * len(heat_map.rows) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" '
        f'font-size="{FONT_SIZE}">',
        f"<title>{escape(heat_map.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 22, heat_map.title, anchor="start", weight="bold"),
        _text(LEFT - 10, TOP - 8, heat_map.row_title, anchor="end"),
        _text(LEFT, TOP - 26, heat_map.column_title, anchor="start"),
    ]
    for column, label in enumerate(heat_map.columns):
        parts.append(_text(LEFT + CELL_WIDTH * (column + 0.5), TOP - 8, label))
    for row, label in enumerate(heat_map.rows):
        middle = TOP + CELL_HEIGHT * (row + 0.5)
        parts.append(_text(LEFT - 10, middle + 5, label, anchor="end"))
        parts += [
            _cell(LEFT + CELL_WIDTH * column, TOP + CELL_HEIGHT * row, share, written)
            for column, (share, written) in enumerate(
                zip(heat_map.shares[row], heat_map.labels[row], strict=True)
            )
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(left: float, top: float, share: float, written: str) -> str:
    part = min(1.0, max(0.0, share))
    red, green, blue = (
        round(pale + (deep - pale) * part) for pale, deep in zip(PALE, DEEP, strict=True)
    )
    ink = "#ffffff" if part > 0.5 else "#1a1a1a"
    square = (
        f'<rect x="{left:g}" y="{top:g}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" '
        f'fill="#{red:02x}{green:02x}{blue:02x}"/>'
    )
    return square + _text(left + CELL_WIDTH / 2 - 1, top + CELL_HEIGHT / 2 + 4, written, ink=ink)


def _text(
    x: float,
    y: float,
    written: str,
    *,
    anchor: str = "middle",
    weight: str = "normal",
    ink: str = "#1a1a1a",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{ink}">'
        f"{escape(written)}</text>"
    )
