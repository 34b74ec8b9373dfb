"""StagedManifest: what a folder of token shards holds, written last and never changed."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.data.documents import RejectCount
from nsa_core.data.errors import DataError
from nsa_core.data.sources.base import SourcePosition, SourceRecord
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import JsonError, read_bounded

MANIFEST_NAME = "manifest.json"
JOURNAL_NAME = "journal.json"
#: A million files take about 200 MB; a run directory with one may come from anywhere.
MAX_BYTES = 2**29
Split = Literal["train", "validation"]


class TokenizerRecord(FrozenModel):
    """Which tokenizer made the ids."""

    name: str
    vocab_size: int
    end_id: int
    fingerprint: str


class ShardRecord(FrozenModel):
    """One shard: ids, the starts of its documents, and their content hashes, in three files."""

    split: Split
    name: str
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    sha256: dict[str, str]


class StagingPlan(FrozenModel):
    """Everything that decides the tokens of a staging; its hash names the folder."""

    schema_version: int = 1
    source: SourceRecord
    tokenizer: str
    max_tokens: int
    validation_fraction: float
    #: Documents read ahead, which decides the counts of rejects where `max_tokens` ends a staging.
    read_ahead: int

    def key(self) -> str:
        """A short name that equal plans, and no others, share."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class StagedManifest(FrozenModel):
    """What was staged; the same sources, tokenizer and settings give the same bytes anywhere."""

    schema_version: int = 1
    plan: StagingPlan
    tokenizer: TokenizerRecord
    dtype: Literal["uint16", "uint32"]
    shards: tuple[ShardRecord, ...]
    rejected: dict[str, RejectCount]
    repaired: dict[str, RejectCount]
    #: A corpus in which no document fell to validation gives up the one with the lowest hash.
    validation_threshold: str

    def total(self, split: Split) -> tuple[int, int, int]:
        """Tokens, documents and bytes of text of a split."""
        shards = [shard for shard in self.shards if shard.split == split]
        return (
            sum(shard.num_tokens for shard in shards),
            sum(shard.num_documents for shard in shards),
            sum(shard.num_text_bytes for shard in shards),
        )


class StagingJournal(FrozenModel):
    """Where an unfinished staging stands: its whole shards and the position after them."""

    plan: StagingPlan
    tokenizer: TokenizerRecord
    validation_threshold: str
    shards: tuple[ShardRecord, ...] = ()
    position: SourcePosition = SourcePosition()


def write_manifest(folder: Path, manifest: StagedManifest) -> None:
    """Write the manifest whole; a folder with one is complete."""
    write_text(folder / MANIFEST_NAME, manifest.model_dump_json(indent=1) + "\n")


def read_manifest(folder: Path) -> tuple[StagedManifest, str]:
    """The manifest of a staged folder and the SHA-256 of its bytes.

    Raises:
        DataError: If there is none, or it is damaged.
    """
    path = folder / MANIFEST_NAME
    hint = f"stage again: delete {folder} and run `python -m nsa_core.data` or launch the run"
    try:
        content = read_bounded(path, MAX_BYTES)
        return StagedManifest.model_validate_json(content), hashlib.sha256(content).hexdigest()
    except OSError as error:
        message = f"no staged data in {folder}: {error.strerror or error}"
        raise DataError(message, hint) from error
    except ValidationError as error:
        message = f"{path} is damaged: {error.error_count()} fields do not fit"
        raise DataError(message, hint) from error
    except JsonError as error:
        message = f"{path} cannot be used: {error}"
        raise DataError(message, hint) from error
