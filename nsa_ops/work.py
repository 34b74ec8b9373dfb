"""Work that takes long: how far it is, for whoever shows it while it goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


@dataclass
class Work:
    """One piece of long work; it is changed while another thread shows it.

    Attributes:
        title: What is done, such as `pulling`.
        unit: What is counted: `bytes`, or the word for one, such as `step`; empty where only the
            share is known.
        done: How many are done; None where nothing is counted.
        total: How many there are; None where that is not known.
        detail: What it is at now, such as the name of a file.
    """

    title: str
    unit: str = ""
    done: float | None = None
    total: float | None = None
    detail: str = ""

    def add(self, number: float) -> None:
        """Count some more as done."""
        self.done = (self.done or 0) + number


#: Shows a piece of work as long as the block lasts.
ShowWork = Callable[[Work], AbstractContextManager[object]]


def show_nothing(_work: Work) -> AbstractContextManager[object]:
    """Show it to nobody."""
    return nullcontext()
