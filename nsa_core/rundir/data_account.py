"""DataAccount: which documents of a data set a run trains on, what was dropped, and why."""

from pathlib import Path

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.bounded_json import DOCUMENT, read_bounded
from nsa_core.rundir.bounded_json import parse_model as parse_bounded

#: Reasons and files that one sentence names; the account itself holds more.
MAX_NAMED = 3
#: Why files are skipped in most folders; not worth attention.
HIDDEN = "hidden"


class Count(TolerantModel):
    """How often one reason applied, and where first: `file:line` of the first places."""

    count: int
    first: tuple[str, ...] = ()


class FileAccount(TolerantModel):
    """One file that lost something.

    Attributes:
        file: Its name below the data's folder.
        num_lost: Documents that were dropped; a dropped part of a text counts as its share of one.
        reasons: Records dropped, by reason.
        keys: Keys that its records have where the text's key is missing.
    """

    file: str
    num_documents: int = 0
    num_lost: float = 0.0
    reasons: dict[str, int] = {}
    keys: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """The whole file was lost."""
        return self.num_documents == 0 and self.num_lost > 0

    def sentence(self) -> str:
        """The file, how much of it was lost, and why."""
        whole = "wholly dropped" if self.is_whole else f"{100 * _share(self):.2f} % dropped"
        keys = f"; its records have {_quoted(self.keys)}" if self.keys else ""
        return f"{self.file} {whole} ({_reasons(self.reasons)}{keys})"


class DataAccount(TolerantModel):
    """What became of the records of a data set.

    Attributes:
        rejected: Records that were dropped, by reason.
        repaired: Records that were taken with a change, by reason.
        passed_over: Files that are no data, by reason.
        files: Files that lost something, the worst first; at most the first thousand.
        num_lossy_files: All such files.
        num_whole_files: Files of which nothing was taken.
    """

    schema_version: int = 1
    num_documents: int = 0
    num_lost: float = 0.0
    rejected: dict[str, Count] = {}
    repaired: dict[str, Count] = {}
    passed_over: dict[str, Count] = {}
    files: tuple[FileAccount, ...] = ()
    num_lossy_files: int = 0
    num_whole_files: int = 0

    @property
    def lost_share(self) -> float:
        """Share of the documents that were dropped, 0 to 1."""
        return _share(self)

    @property
    def has_findings(self) -> bool:
        """Whether anything was dropped, repaired or not read."""
        return bool(self.rejected or self.repaired or self.passed_over)

    @property
    def needs_attention(self) -> bool:
        """Whether text was lost or changed, or a file is there that nobody expects."""
        return bool(self.num_lost or self.repaired or self.passed_over.keys() - {HIDDEN})

    def brief(self) -> "DataAccount":
        """The same with the few places and files that a sentence names."""

        def first(counts: dict[str, Count]) -> dict[str, Count]:
            return {k: Count(count=one.count, first=one.first[:1]) for k, one in counts.items()}

        return DataAccount(
            num_documents=self.num_documents,
            num_lost=self.num_lost,
            rejected=first(self.rejected),
            repaired=first(self.repaired),
            passed_over=first(self.passed_over),
            files=self.files[:MAX_NAMED],
            num_lossy_files=self.num_lossy_files,
            num_whole_files=self.num_whole_files,
        )

    def sentence(self) -> str:
        """What was dropped, repaired and not read, by reason; then the worst files."""
        parts = [f"{self.num_documents:,} documents"]
        if self.rejected:
            lost = f"{100 * self.lost_share:.2f} % dropped" if self.num_lost else "nothing lost"
            parts.append(f"{lost} ({_counts(self.rejected)})")
        if self.repaired:
            parts.append(f"repaired: {_counts(self.repaired)}")
        if self.passed_over:
            parts.append(f"not read: {_counts(self.passed_over)}")
        parts += [one.sentence() for one in self.files[:MAX_NAMED]]
        more = self.num_lossy_files - MAX_NAMED
        return "; ".join([*parts, f"and {more:,} more files"] if more > 0 else parts)


def find_excess(account: DataAccount, max_dropped: float, max_dropped_files: int) -> str | None:
    """Why too much was dropped; None where it is within the limits.

    Args:
        account: What was dropped.
        max_dropped: Largest share of the documents.
        max_dropped_files: Most files that may be lost as a whole.
    """
    wholes = [one for one in account.files if one.is_whole]
    if account.num_whole_files > max_dropped_files:
        named = "; ".join(one.sentence() for one in wholes[:MAX_NAMED])
        files = f"{account.num_whole_files:,} whole file{'s' * (account.num_whole_files > 1)}"
        return (
            f"{files} would be dropped, and data.max_dropped_files allows {max_dropped_files}: "
            f"{named}"
        )
    if account.lost_share > max_dropped:
        return (
            f"{100 * account.lost_share:.2f} % of the documents would be dropped, data.max_dropped "
            f"allows {100 * max_dropped:.2f} %: {account.sentence()}"
        )
    return None


def read_account(path: Path) -> DataAccount | None:
    """The account in a file; None where there is none.

    Raises:
        ValueError: If it cannot be used.
        OSError: If it cannot be read.
    """
    try:
        content = read_bounded(path, DOCUMENT.max_bytes)
    except FileNotFoundError:
        return None
    return parse_bounded(DataAccount, content)


def _share(found: FileAccount | DataAccount) -> float:
    total = found.num_documents + found.num_lost
    return found.num_lost / total if total > 0 else 0.0


def _counts(counts: dict[str, Count]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1].count)
    named = [
        f"{reason}: {one.count:,}"
        + (f", first {one.first[0].removesuffix(':0')}" if one.first else "")
        for reason, one in ordered[:MAX_NAMED]
    ]
    rest = sum(one.count for _, one in ordered[MAX_NAMED:])
    return "; ".join([*named, f"other reasons: {rest:,}"] if rest else named)


def _reasons(reasons: dict[str, int]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason}: {count:,}" for reason, count in ordered[:MAX_NAMED])


def _quoted(keys: tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
