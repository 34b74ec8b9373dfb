"""Lines of a screen about a run: a name, a text, and a colour that stresses it."""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from nsa_ops.printable import printable_brief

_LABEL_WIDTH = 12


@dataclass(frozen=True)
class ScreenLine:
    """One line of a screen: its name, its text, and the colour that stresses it."""

    label: str
    value: str
    style: str = ""

    @property
    def text(self) -> str:
        """The line without colour, which carries the same meaning."""
        return f"{self.label:<{_LABEL_WIDTH}} {self.value}" if self.label else self.value


def draw_rows(console: Console, rows: list[ScreenLine]) -> None:
    """Lines of a screen, one below the other."""
    for row in rows:
        console.print(styled(row), soft_wrap=True)


def styled(row: ScreenLine) -> Text:
    """A line in its colours; a control character is shown, never obeyed."""
    text = printable_brief(row.text)
    start = _LABEL_WIDTH if row.label else 0
    shown = Text(text)
    shown.stylize(row.style, start)
    if row.label:
        shown.stylize("bold", 0, len(row.label))
    return shown
