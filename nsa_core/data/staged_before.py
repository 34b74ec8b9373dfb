"""Find the shards that a run began with, and say how the data they were made of has changed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.config.training import DataConfig
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.reporting import DataError
from nsa_core.data.shards import MANIFEST_NAME, StagedManifest, StagingPlan, read_manifest
from nsa_core.data.sources.make import make_source
from nsa_core.data.sources.source import SourceFile, SourceRecord
from nsa_core.data.tokenizer import tokenizer_identity
from nsa_core.rundir.atomic import write_text

PATHS_NAME = "paths.json"
#: More files are not looked at again by a run that has its shards: that takes minutes.
MAX_FILES_LOOKED_AT = 10_000
#: A larger file that was written since is compared by its size, not read again.
MAX_BYTES_HASHED = 16 * 2**20
MAX_PATHS = 20
#: Files that one sentence names.
MAX_NAMED = 5
#: Stands for the hash of a file that was not read.
NOT_HASHED = ""


class StagedPaths(FrozenModel):
    """Content of paths.json: where the data of a folder was found, newest last."""

    paths: tuple[str, ...] = ()


def find_staged(cache: Path, manifest_sha256: str) -> Path | None:
    """The folder whose manifest has this hash; None if there is none."""
    for path in sorted(cache.glob(f"*/{MANIFEST_NAME}")):
        if hashlib.sha256(path.read_bytes()).hexdigest() == manifest_sha256:
            return path.parent
    return None


def note_path(folder: Path, config: DataConfig) -> None:
    """Remember that the data of a folder is found at the configured path."""
    if config.source != "fineweb_edu_local":
        return
    path, known = str(Path(config.path).absolute()), _read_paths(folder)
    if path not in known:
        content = StagedPaths(paths=(*known, path)[-MAX_PATHS:])
        write_text(folder / PATHS_NAME, content.model_dump_json() + "\n")


def _read_paths(folder: Path) -> tuple[str, ...]:
    """The paths; none where an older version staged, or the file is damaged: it saves a look."""
    try:
        return StagedPaths.model_validate_json((folder / PATHS_NAME).read_bytes()).paths
    except (FileNotFoundError, ValidationError):
        return ()


@dataclass(frozen=True)
class StagedBefore:
    """A staged folder, seen from a configuration that may be the one it was made from."""

    config: DataConfig
    seed: int
    folder: Path

    @cached_property
    def manifest(self) -> StagedManifest:
        """What the folder holds."""
        return read_manifest(self.folder)[0]

    @property
    def fits(self) -> bool:
        """Whether it was made with the settings of the configuration, wherever its data was."""
        plan, config = self.manifest.plan, self.config
        kept = {
            "text_key": config.text_key,
            "subset": config.subset,
            "dataset": config.path or plan.source.settings.get("dataset"),
            "seed": self.seed,
        }
        return (
            plan.source.kind == config.source
            and all(kept.get(name, value) == value for name, value in plan.source.settings.items())
            and plan.tokenizer == tokenizer_identity(config)
            and plan.max_tokens == config.max_tokens
            and plan.validation_fraction == config.validation_fraction
        )

    @property
    def is_of_this_path(self) -> bool:
        """Whether its data was found at the configured path before."""
        if self.config.source != "fineweb_edu_local":
            return True
        return str(Path(self.config.path).absolute()) in _read_paths(self.folder)

    @property
    def is_gone(self) -> bool:
        """Whether nothing is at the configured path, and nobody knows where the data was."""
        return not _read_paths(self.folder) and not Path(self.config.path).exists()

    def describe_changes(self, hashes: FileHashes) -> str:
        """How the data differs now; empty if it does not, or if it has too many files to look."""
        before = self.manifest.plan.source
        if len(before.files) > MAX_FILES_LOOKED_AT:
            return ""

        def quick_hash(path: Path) -> str:
            known = hashes.recall(path)
            if known is not None:
                return known
            return hashes(path) if path.stat().st_size <= MAX_BYTES_HASHED else NOT_HASHED

        try:
            after = make_source(self.config, self.seed).record(quick_hash)
        except DataError as error:
            return error.message
        return "; ".join(describe_files(before, after))


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
