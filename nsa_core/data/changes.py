"""Say in words how a data set differs from the one that was staged before."""

from collections.abc import Iterator

from nsa_core.data.manifest import StagingPlan
from nsa_core.data.sources.base import SourceFile, SourceRecord

#: Files that one sentence names.
MAX_NAMED = 5
#: Stands for the hash of a file that was not read.
NOT_HASHED = ""


def describe_changes(before: StagingPlan, after: StagingPlan) -> str:
    """What differs between two plans; empty if nothing does."""
    parts = [*_settings(before.source, after.source)]
    for name in ("tokenizer", "max_tokens", "validation_fraction", "read_ahead"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            parts.append(f"{name.replace('_', ' ')} was {old} and is {new}")
    return "; ".join([*parts, *describe_files(before.source, after.source)])


def describe_files(before: SourceRecord, after: SourceRecord) -> list[str]:
    """The files that differ, a few by name and the rest as a number."""
    changes = list(_files(before, after))
    more = len(changes) - MAX_NAMED
    return [*changes[:MAX_NAMED], *([f"and {more:,} more files"] if more > 0 else [])]


def _settings(before: SourceRecord, after: SourceRecord) -> Iterator[str]:
    if before.kind != after.kind:
        yield f"the source was {before.kind} and is {after.kind}"
        return
    for name in sorted(before.settings.keys() | after.settings.keys()):
        old, new = before.settings.get(name), after.settings.get(name)
        if old != new:
            yield f"{name} was {old} and is {new}"


def _files(before: SourceRecord, after: SourceRecord) -> Iterator[str]:
    old = {file.name: file for file in before.files}
    new = {file.name: file for file in after.files}
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"{name} is gone"
        elif name not in old:
            yield f"{name} is new"
        elif _differs(old[name], new[name]):
            yield f"{name} has changed ({_sizes(old[name], new[name])})"


def _differs(old: SourceFile, new: SourceFile) -> bool:
    if old.num_bytes != new.num_bytes:
        return True
    return old.sha256 != new.sha256 and NOT_HASHED not in (old.sha256, new.sha256)


def _sizes(old: SourceFile, new: SourceFile) -> str:
    if old.num_bytes == new.num_bytes:
        return f"{new.num_bytes:,} bytes as before, other content"
    return f"{old.num_bytes:,} bytes before, {new.num_bytes:,} now"
