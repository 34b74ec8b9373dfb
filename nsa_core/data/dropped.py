"""Refuse a staging that drops too much of its data, naming the files and what to do about them."""

from nsa_core.config.training import DataConfig
from nsa_core.data.errors import DataError
from nsa_core.data.manifest import StagedManifest, StagingJournal
from nsa_core.rundir.data_account import Count, DataAccount, find_excess

ACCOUNT_NAME = "account.json"
#: Before this many records the share that is dropped says little about the rest.
MIN_RECORDS = 1000
#: Reasons in the manifests of older stagings by which no text was lost.
HARMLESS = frozenset({"empty line", "unknown kind of file", "link to a folder, not followed"})
#: What to do about a reason, by words in it.
ADVICE = (
    (("UTF-16", "UTF-32"), "convert it with `iconv -f UTF-16 -t UTF-8` (or UTF-32)"),
    (("packed with",), "unpack it, or pack it with gzip or zstd"),
    (("no key",), "name the key of the text with data.text_key"),
    (("not UTF-8",), "convert it, for example with `iconv -f WINDOWS-1252 -t UTF-8`"),
)


def require_text(name: str, account: DataAccount) -> None:
    """Refuse data without a document.

    Raises:
        DataError: Always; with the reasons, and the keys that its records have.
    """
    if account.num_documents:
        return
    message = f"{name} holds no text that can be used: {account.sentence()}"
    raise DataError(message, _advice(account) or "correct data.path or data.text_key")


def require_within_limits(name: str, account: DataAccount, config: DataConfig) -> None:
    """Refuse data of which more is dropped than the configuration allows.

    Raises:
        DataError: With what was dropped and why; the hint names the setting that allows it.
    """
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


def older_account(staged: StagedManifest | StagingJournal) -> DataAccount:
    """The account of what an older version staged, which kept none by file."""
    counts = staged if isinstance(staged, StagedManifest) else staged.position
    rejected, repaired = counts.rejected, counts.repaired
    lost = sum(n.count for reason, n in rejected.items() if reason not in HARMLESS)
    return DataAccount(
        num_documents=sum(shard.num_documents for shard in staged.shards),
        num_lost=float(lost),
        rejected={k: Count(count=n.count, first=n.origins) for k, n in rejected.items()},
        repaired={k: Count(count=n.count, first=n.origins) for k, n in repaired.items()},
    )


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
