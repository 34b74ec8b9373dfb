"""Token shards: the manifest of a staged folder, and its tokens read as one long row."""

import hashlib
import io
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.data.documents import RejectCount
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.ids import Ids
from nsa_core.data.reporting import DataError
from nsa_core.data.sources.source import SourcePosition, SourceRecord
from nsa_core.data.tokenizer import TokenizerRecord
from nsa_core.rundir.atomic import write_bytes, write_text
from nsa_core.rundir.bounded_json import JsonError, read_bounded
from nsa_core.rundir.data_account import Count, DataAccount

MANIFEST_NAME = "manifest.json"
ACCOUNT_NAME = "account.json"
JOURNAL_NAME = "journal.json"
#: A million files take about 200 MB; a run directory with one may come from anywhere.
MAX_BYTES = 2**29
Split = Literal["train", "validation"]
#: Reasons in the manifests of older stagings by which no text was lost.
HARMLESS = frozenset({"empty line", "unknown kind of file", "link to a folder, not followed"})
#: Tokens after which a shard is closed; it ends with a document, so it can be a little longer.
SHARD_TOKENS = 2**24


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
    """The state of an unfinished staging: its whole shards and the position after them."""

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


def dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest unsigned type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass
class ShardBuffer:
    """Documents of one split that are not on disk yet."""

    split: Split
    end_id: int
    dtype: np.dtype[np.unsignedinteger]
    num_tokens: int = 0
    num_text_bytes: int = 0
    _rows: list[NDArray[np.unsignedinteger]] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _hashes: list[bytes] = field(default_factory=list)

    def add(self, ids: Ids, content_hash: bytes, num_bytes: int) -> None:
        """Append a document and its end token."""
        row = np.empty(len(ids) + 1, dtype=self.dtype)
        row[:-1] = ids
        row[-1] = self.end_id
        self._starts.append(self.num_tokens)
        self._hashes.append(content_hash)
        self._rows.append(row)
        self.num_tokens += len(row)
        self.num_text_bytes += num_bytes

    def write(self, folder: Path, number: int) -> ShardRecord:
        """Write the three files of a shard, each whole or not at all."""
        name = f"{self.split}_{number:05d}"
        contents = {
            f"{name}.tokens.npy": _npy(np.concatenate(self._rows)),
            f"{name}.starts.npy": _npy(np.asarray(self._starts, dtype=np.int64)),
            f"{name}.hashes.npy": _npy(
                np.frombuffer(b"".join(self._hashes), dtype=np.uint8).reshape(-1, 32)
            ),
        }
        for file_name, content in contents.items():
            write_bytes(folder / file_name, content)
        return ShardRecord(
            split=self.split,
            name=name,
            num_tokens=self.num_tokens,
            num_documents=len(self._starts),
            num_text_bytes=self.num_text_bytes,
            sha256={
                name: hashlib.sha256(content).hexdigest() for name, content in contents.items()
            },
        )


class SplitTokens:
    """The tokens of one split as one row; safe to use from any thread.

    Raises:
        DataError: If a shard is missing, has another size than its record says, or cannot be read.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardRecord]) -> None:
        self._files = [_ShardFile(folder, shard) for shard in shards]
        self._ends = np.cumsum([shard.num_tokens for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`, which may lie in several shards; short at the end."""
        parts: list[NDArray[np.int64]] = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while number < len(self._files) and start < min(stop, len(self)):
            shard = self._files[number]
            first = int(self._ends[number]) - len(shard)
            part = shard.read(start - first, stop - first)
            parts.append(part)
            start += len(part)
            number += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def read_hashes(folder: Path, shards: Sequence[ShardRecord]) -> set[bytes]:
    """The content hashes of the documents in some shards."""
    found: set[bytes] = set()
    for shard in shards:
        rows = np.load(folder / f"{shard.name}.hashes.npy", allow_pickle=False)
        found.update(row.tobytes() for row in rows)
    return found


def verify_shards(folder: Path, shards: Sequence[ShardRecord], hashes: FileHashes) -> None:
    """Compare the files of all shards with the hashes in their records.

    Raises:
        DataError: If a file is missing or a bit of it has changed.
    """
    recorded = {name: sha256 for shard in shards for name, sha256 in shard.sha256.items()}
    hashed = hashes.all_of([folder / name for name in recorded])
    for name, expected in recorded.items():
        try:
            found = next(hashed)
        except OSError as error:
            raise _broken(folder, f"{name} cannot be read: {error.strerror or error}") from error
        if found != expected:
            raise _broken(folder, f"{name} has SHA-256 {found[:12]}, not {expected[:12]}")


class _ShardFile:
    """The tokens of one shard, read from an open file.

    A memory map would be simpler, but where the disk fails or the file was cut, it ends the process
    by SIGBUS without a word. `np.load` opens the file once more and at once closes it: it alone
    checks the version, the type and the length that a header claims.
    """

    def __init__(self, folder: Path, shard: ShardRecord) -> None:
        self._folder, self._name = folder, f"{shard.name}.tokens.npy"
        try:
            row: np.memmap[Any, Any] = np.load(
                folder / self._name, mmap_mode="r", allow_pickle=False
            )
            self._descriptor = os.open(folder / self._name, os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise _broken(folder, f"{self._name} cannot be opened: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        if row.shape != (shard.num_tokens,):
            raise _broken(folder, f"{self._name} has {row.size} tokens, not {shard.num_tokens}")
        self._num_tokens, self._dtype, self._offset = shard.num_tokens, row.dtype, row.offset

    def __len__(self) -> int:
        return self._num_tokens

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`; short at the end."""
        size = self._dtype.itemsize
        num_bytes = (min(stop, self._num_tokens) - start) * size
        try:
            content = os.pread(self._descriptor, num_bytes, self._offset + start * size)
        except OSError as error:
            raise _broken(self._folder, f"{self._name} cannot be read: {error.strerror}") from error
        if len(content) != num_bytes:
            raise _broken(self._folder, f"{self._name} was cut after it was opened")
        return np.frombuffer(content, self._dtype).astype(np.int64)


def _broken(folder: Path, what: str) -> DataError:
    return DataError(f"staged shard {what}", f"delete {folder} and stage again")


def _npy(values: NDArray[np.generic]) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()
