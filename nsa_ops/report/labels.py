"""Where a threshold's label stands in a plot so that no line runs through it; pixels only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: In pixels, for the 11 px font of `svg .note`; a little more than most letters need.
LETTER, ASCENT, DESCENT = 6.0, 10.0, 3.0
#: Between a label and the rule it belongs to.
GAP = 4.0
_MARGIN = 2.0
_SHIFTS = 8

Pixel = tuple[float, float]


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
class Place:
    """Where a label's text ends on its right, its baseline, and the room it takes."""

    right: float
    baseline: float
    box: Box


def place_label(
    label: str, rule_y: float, plot: Box, lines: Sequence[Sequence[Pixel]], taken: Sequence[Box]
) -> Place:
    """The first free place along a rule, from the right: above it, then below it.

    Args:
        label: The text.
        rule_y: Height of the rule.
        plot: Area that the label must not leave.
        lines: Unbroken lines of the plot, each in order of x.
        taken: Other labels and rules.

    Returns:
        Where it stands; at the right above the rule if no place is free.
    """
    places = list(_places(len(label) * LETTER, rule_y, plot))
    for place in places:
        is_free = not any(place.box.meets(other) for other in taken)
        if is_free and not any(_runs_through(line, place.box) for line in lines):
            return place
    return places[0]


def _places(width: float, rule_y: float, plot: Box) -> Iterator[Place]:
    """Every place to try, the usual one first."""
    slack = max(0.0, plot.right - plot.left - width)
    for index in range(_SHIFTS + 1):
        right = plot.right - slack * index / _SHIFTS
        for baseline in (rule_y - GAP, rule_y + ASCENT + GAP - DESCENT + _MARGIN):
            box = Box(
                right - width - _MARGIN, baseline - ASCENT, right + _MARGIN, baseline + DESCENT
            )
            if index == 0 or (box.top >= plot.top and box.bottom <= plot.bottom):
                yield Place(right, baseline, box)


def _runs_through(line: Sequence[Pixel], box: Box) -> bool:
    if len(line) == 1:
        return box.is_crossed(line[0], line[0])
    return any(box.is_crossed(start, end) for start, end in pairwise(line))
