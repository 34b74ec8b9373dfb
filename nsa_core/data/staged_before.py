"""Find the shards that a run was begun with, and say what became of the data they were made of."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.config.training import DataConfig
from nsa_core.data.changes import NOT_HASHED, describe_files
from nsa_core.data.errors import DataError
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.manifest import MANIFEST_NAME, StagedManifest, read_manifest
from nsa_core.data.sources.make import make_source
from nsa_core.data.vocabulary import tokenizer_identity
from nsa_core.rundir.atomic import write_text

PATHS_NAME = "paths.json"
#: More files are not looked at again by a run that has its shards: that takes minutes.
MAX_FILES_LOOKED_AT = 10_000
#: A larger file that was written since is told by its size, not read again.
MAX_BYTES_HASHED = 16 * 2**20
MAX_PATHS = 20


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
    """Remember that the data of a folder is found at the configured path.

    Raises:
        OSError: If the disk is full or not writable.
    """
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
