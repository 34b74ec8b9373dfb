"""What the data phase tells its caller: progress while it works, and DataError where it cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


class DataError(ValueError):
    """Bad or missing data; the trainer ends with exit code 14."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class StageProgress:
    """One report; `wait` is a visible stall (a lock, or a hub that does not answer).

    Attributes:
        share: How much of it is done, 0 to 1; None where its end is not known.
    """

    doing: Literal["hash", "tokenizer", "tokenise", "wait", "verify"]
    num_documents: int = 0
    num_tokens: int = 0
    detail: str = ""
    share: float | None = None

    def line(self) -> str:
        """One line for a terminal."""
        counts = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens"
        return f"{self.doing}: {counts}" + (f" ({self.detail})" if self.detail else "")


#: Called often; it may raise to stop the staging; the next one continues after the last shard.
OnProgress = Callable[[StageProgress], None]


def ignore_progress(progress: StageProgress) -> None:
    """Report to nobody."""
    del progress
