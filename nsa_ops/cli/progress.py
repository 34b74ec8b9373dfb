"""Show long work on stderr: a bar on a terminal, a line every 10 s elsewhere."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsa_ops.cli.console import bar, share_of
from nsa_ops.printable import printable
from nsa_ops.quantities import count_of, format_bytes, format_duration

if TYPE_CHECKING:
    from nsa_ops.context import Work

#: Seconds between two lines off a terminal, and between two states of a bar.
LINE_S = 10.0
_BAR_S = 0.25
_BAR_WIDTH = 24
#: The time that is left is shown once this share of the work is done.
_FIRST_SHARE = 0.02
_CLEAR = "\r\x1b[2K"


def work_line(work: "Work", seconds: float, encoding: str) -> str:
    """How far a piece of work is, in one line.

    Args:
        work: The work.
        seconds: Since it began.
        encoding: Of the terminal, for the bar.
    """
    parts = [*_counted(work, seconds, encoding), work.detail]
    said = ", ".join(part for part in parts if part)
    return f"{work.title}: {said + ', ' if said else ''}{format_duration(seconds)} so far"


def _counted(work: "Work", seconds: float, encoding: str) -> list[str]:
    done, total = work.done, work.total
    if done is None:
        return []
    if not total:
        return [_amount(done, work.unit)] if done and work.unit else []
    share = share_of(done, total)
    shown = f"{bar(share, encoding, _BAR_WIDTH)} {100 * share:.0f} %"
    if not work.unit:
        return [shown]
    if work.unit != "bytes":  # one probe or step may take as long as all others: no time is shown
        return [shown, f"{round(done):,} of {_amount(total, work.unit)}"]
    left = seconds * (1 - share) / share if share >= _FIRST_SHARE else None
    of = f"{format_bytes(done)} of {format_bytes(total)}"
    return [shown, of, f"about {format_duration(left)} left" if left else ""]


def _amount(number: float, unit: str) -> str:
    return format_bytes(number) if unit == "bytes" else count_of(round(number), unit)


class Display:
    """Stderr of one command: its lines, and below them the bar of what is being done.

    Attributes:
        is_terminal: A bar can be drawn.
    """

    def __init__(self, say: Callable[[str], None], *, line_s: float = LINE_S) -> None:
        """Begin without work.

        Args:
            say: Prints one line.
            line_s: Seconds between two lines where no bar can be drawn.
        """
        self._say = say
        self._line_s = line_s
        self.is_terminal = False
        self._lock = threading.RLock()
        self._has_bar = False

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        with self._lock:
            self._clear()
            self._say(text)

    @contextmanager
    def working(self, work: "Work") -> Iterator[None]:
        """Show a piece of work until the block ends, however it ends."""
        ended = threading.Event()
        shower = threading.Thread(target=self._show, args=(work, ended), daemon=True)
        shower.start()
        try:
            yield
        finally:
            ended.set()
            shower.join()
            with self._lock:
                self._clear()

    def _show(self, work: "Work", ended: threading.Event) -> None:
        began_s = time.monotonic()
        while not ended.wait(_BAR_S if self.is_terminal else self._line_s):
            text = work_line(work, time.monotonic() - began_s, sys.stderr.encoding)
            (self._draw if self.is_terminal else self._say)(text)

    def _draw(self, text: str) -> None:
        with self._lock:
            room = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR + printable(text[:room])[:room])
            self._has_bar = True

    def _clear(self) -> None:
        if self._has_bar:
            self._write(_CLEAR)
            self._has_bar = False

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
