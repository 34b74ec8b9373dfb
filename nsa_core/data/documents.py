"""Document and RejectTally: one text with its origin, and what was not taken and why."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nsa_core.config.base import FrozenModel

#: Origins kept by name for each reason; the count goes on beyond it, so memory stays bounded.
MAX_NAMED_ORIGINS = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Origin:
    """Where a record stands: a file (or data set) and its line, row or piece, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A text as it is trained on: valid Unicode, newlines as line ends, not empty."""

    text: str
    origin: Origin


class RejectCount(FrozenModel):
    """How many records one reason concerned, and where the first of them stand."""

    count: int
    origins: tuple[str, ...]


@dataclass
class RejectTally:
    """Counts records that were rejected, or repaired, by reason; origins are a bounded list."""

    counts: dict[str, int] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, origin: Origin) -> None:
        """Count one record under a reason."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.origins.setdefault(reason, [])
        if len(named) < MAX_NAMED_ORIGINS:
            named.append(str(origin))

    def freeze(self) -> dict[str, RejectCount]:
        """The counts as they go into a manifest, sorted by reason."""
        return {
            reason: RejectCount(count=self.counts[reason], origins=tuple(self.origins[reason]))
            for reason in sorted(self.counts)
        }

    def restore(self, frozen: dict[str, RejectCount]) -> None:
        """Go on from counts that an interrupted staging wrote down."""
        self.counts = {reason: found.count for reason, found in frozen.items()}
        self.origins = {reason: list(found.origins) for reason, found in frozen.items()}

    def summary(self) -> str:
        """One line: `empty text 1 (a.jsonl:2), malformed JSON 1 (a.jsonl:5)`."""
        parts = (
            f"{reason} {found.count} (first {found.origins[0]})"
            for reason, found in self.freeze().items()
        )
        return ", ".join(parts) or "nothing was rejected"


@dataclass
class Tallies:
    """What a source counts beside its documents: records it left out, and ones it mended."""

    rejected: RejectTally = field(default_factory=RejectTally)
    repaired: RejectTally = field(default_factory=RejectTally)


def take_text(text: str, origin: Origin, tallies: Tallies) -> Iterator[Document]:
    """Yield the text as a document, or count why it is none.

    Line ends become newlines (no carriage return is left), a byte-order mark at the start goes
    away, and a lone surrogate, which has no UTF-8 form, becomes U+FFFD and is counted as repaired.
    """
    clean = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not clean.strip():
        tallies.rejected.add("empty text", origin)
        return
    if "\0" in clean:
        tallies.rejected.add("text holds a NUL", origin)
        return
    whole, num_replaced = _SURROGATE.subn("\ufffd", clean)
    if num_replaced:
        tallies.repaired.add("lone surrogate replaced by U+FFFD", origin)
    yield Document(whole, origin)
