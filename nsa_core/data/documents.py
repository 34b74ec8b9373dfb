"""Document and Tallies: a text with its origin, what was not taken and why, and how much may be."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from nsa_core.config.base import FrozenModel
from nsa_core.config.training import DataConfig
from nsa_core.data.reporting import DataError
from nsa_core.rundir.data_account import Count, DataAccount, FileAccount, find_excess

#: Origins kept by name for each reason; more are only counted, so that memory stays bounded.
MAX_NAMED_ORIGINS = 20
#: Files that are kept by name with what they lost; beyond it they are only counted.
MAX_LOSSY_FILES = 1000
#: Keys that are named where the text's key is missing, and characters of each.
MAX_KEYS = 12
MAX_KEY_LENGTH = 60
#: Records between two calls of `Tallies.look`: hundredths of a second.
LOOK_EVERY = 1000
#: Before this many records the share that is dropped says little about the rest.
MIN_RECORDS = 1000
#: What to do about a reason, by words in it.
ADVICE = (
    (("UTF-16", "UTF-32"), "convert it with `iconv -f UTF-16 -t UTF-8` (or UTF-32)"),
    (("packed with",), "unpack it, or pack it with gzip or zstd"),
    (("no key",), "name the key of the text with data.text_key"),
    (("not UTF-8",), "convert it, for example with `iconv -f WINDOWS-1252 -t UTF-8`"),
)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class RecordOrigin:
    """Where a record is: a file (or data set) and its line, row or piece, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A text as it is trained on: valid Unicode, newlines as line ends, not empty."""

    text: str
    origin: RecordOrigin


class RejectCount(FrozenModel):
    """How many records one reason concerned, and where the first of them stand."""

    count: int
    origins: tuple[str, ...]


@dataclass
class RejectTally:
    """Counts records that were rejected, or repaired, by reason; origins are a bounded list."""

    counts: dict[str, int] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, origin: RecordOrigin, count: int = 1) -> None:
        """Count a record, or what is at one place, under a reason."""
        self.counts[reason] = self.counts.get(reason, 0) + count
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


@dataclass
class _FileCount:
    """What became of the records of one file."""

    num_documents: int = 0
    num_lost: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)


@dataclass
class Tallies:
    """What a source counts: documents it took, records it left out or repaired, and files.

    Files are kept only as long as they are read, or if they lost something.

    Attributes:
        look: Called after every `LOOK_EVERY` records, also where none of them gives a document, so
            that whoever waits for one sees progress; what it raises ends the reading.
    """

    rejected: RejectTally = field(default_factory=RejectTally)
    repaired: RejectTally = field(default_factory=RejectTally)
    passed_over: RejectTally = field(default_factory=RejectTally)
    num_documents: int = 0
    num_lost: float = 0.0
    look: Callable[[], None] | None = None
    num_seen: int = 0
    _num_lossy_files: int = 0
    _num_whole_files: int = 0
    _lossy: list[FileAccount] = field(default_factory=list)
    _name: str = ""
    _file: _FileCount = field(default_factory=_FileCount)

    def take(self, origin: RecordOrigin) -> None:
        """Count a document that is trained on."""
        self._file_of(origin).num_documents += 1
        self.num_documents += 1
        self._see()

    def reject(self, reason: str, origin: RecordOrigin, num_lost: float = 1.0) -> None:
        """Count a record that is dropped, and the documents that are lost by it.

        An empty line, for example, loses none; a part of a text loses a part of one.
        """
        self.rejected.add(reason, origin)
        file = self._file_of(origin)
        file.reasons[reason] = file.reasons.get(reason, 0) + 1
        file.num_lost += num_lost
        self.num_lost += num_lost
        self._see()

    def _see(self) -> None:
        self.num_seen += 1
        if self.look is not None and self.num_seen % LOOK_EVERY == 0:
            self.look()

    def note_keys(self, keys: Iterable[str], origin: RecordOrigin) -> None:
        """Remember keys of a record without the text's key, escaped: the data may be hostile."""
        known = self._file_of(origin).keys
        for key in keys:
            if len(known) >= MAX_KEYS:
                return
            known[ascii(key[:MAX_KEY_LENGTH])[1:-1]] = None

    def account(self, *, goes_on: bool = False) -> DataAccount:
        """Everything so far; the file that is being read counts as if it ended here.

        If it `goes_on`, it is not counted as lost as a whole: the rest of it is not known.
        """
        now = self._describe_file()
        is_whole = now is not None and now.is_whole and not goes_on
        lossy = [*self._lossy, now] if now is not None else self._lossy
        worst = sorted(lossy, key=lambda one: (not one.is_whole, -one.num_lost))
        return DataAccount(
            num_documents=self.num_documents,
            num_lost=round(self.num_lost, 6),
            rejected=_counts(self.rejected),
            repaired=_counts(self.repaired),
            passed_over=_counts(self.passed_over),
            files=tuple(worst),
            num_lossy_files=self._num_lossy_files + (now is not None),
            num_whole_files=self._num_whole_files + is_whole,
        )

    def restore(self, account: DataAccount, file: str) -> None:
        """Go on from the account of a source that is one file; reasons are restored apart."""
        self.num_documents, self.num_lost = account.num_documents, account.num_lost
        known = account.files[0] if account.files else FileAccount(file=file)
        self._name = file
        self._file = _FileCount(account.num_documents, account.num_lost, dict(known.reasons))

    def _file_of(self, origin: RecordOrigin) -> _FileCount:
        if origin.file != self._name:
            self._close()
            self._name = origin.file
        return self._file

    def _close(self) -> None:
        """Keep what a file lost; one that lost nothing is forgotten."""
        found = self._describe_file()
        self._file, self._name = _FileCount(), ""
        if found is None:
            return
        self._num_lossy_files += 1
        self._num_whole_files += found.is_whole
        if len(self._lossy) < MAX_LOSSY_FILES:
            self._lossy.append(found)

    def _describe_file(self) -> FileAccount | None:
        file = self._file
        if not file.num_lost:
            return None
        return FileAccount(
            file=self._name,
            num_documents=file.num_documents,
            num_lost=round(file.num_lost, 6),
            reasons=dict(file.reasons),
            keys=tuple(file.keys),
        )


def _counts(tally: RejectTally) -> dict[str, Count]:
    return {
        reason: Count(count=found.count, first=found.origins)
        for reason, found in tally.freeze().items()
    }


def take_text(
    text: str, origin: RecordOrigin, tallies: Tallies, num_lost_if_empty: float = 1.0
) -> Iterator[Document]:
    """Yield the text as a document, or count why it is none.

    Line ends become newlines (no carriage return is left), a byte-order mark at the start goes
    away, and a lone surrogate, which has no UTF-8 form, becomes U+FFFD and is counted as repaired.
    An empty text loses `num_lost_if_empty` documents: none where it is a whole file.
    """
    clean = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not clean.strip():
        tallies.reject("empty text", origin, num_lost_if_empty)
        return
    if "\0" in clean:
        tallies.reject("text holds a NUL", origin)
        return
    whole, num_replaced = _SURROGATE.subn("\ufffd", clean)
    if num_replaced:
        tallies.repaired.add("lone surrogate replaced by U+FFFD", origin)
    tallies.take(origin)
    yield Document(whole, origin)


def require_text(name: str, account: DataAccount) -> None:
    """Refuse data without a document."""
    if account.num_documents:
        return
    message = f"{name} holds no text that can be used: {account.sentence()}"
    raise DataError(message, _advice(account) or "correct data.path or data.text_key")


def require_within_limits(name: str, account: DataAccount, config: DataConfig) -> None:
    """Refuse data of which more is dropped than the configuration allows."""
    excess = find_excess(account, config.max_dropped, config.max_dropped_files)
    if excess is None:
        return
    allowed = []
    if account.lost_share > config.max_dropped:
        allowed.append(f"`--set data.max_dropped={_rounded_up(account.lost_share)}`")
    if account.num_whole_files > config.max_dropped_files:
        allowed.append(f"`--set data.max_dropped_files={account.num_whole_files}`")
    allow = " and ".join(allowed)
    advice = _advice(account) or "repair or remove what is named"
    message = f"{name}: {excess}"
    raise DataError(message, f"{advice}, or allow it with {allow}")


def _advice(account: DataAccount) -> str:
    """What to do about the worst file, or the most frequent reason."""
    reasons = dict(account.files[0].reasons) if account.files else {}
    reasons = reasons or {reason: n.count for reason, n in account.rejected.items()}
    for reason in sorted(reasons, key=lambda one: -reasons[one]):
        for words, advice in ADVICE:
            if any(word in reason for word in words):
                return advice
    return ""


def _rounded_up(share: float) -> float:
    """The share with two digits, not below it."""
    return min(1.0, (int(share * 100) + 1) / 100)
