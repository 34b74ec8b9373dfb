"""Source: where documents come from, in an order that never changes, and what it is made of."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from nsa_core.config.base import FrozenModel
from nsa_core.data.documents import Document, RejectCount, Tallies
from nsa_core.data.progress import OnProgress, ignore_progress
from nsa_core.rundir.data_account import DataAccount

HASH_BYTES = 2**20
HashOf = Callable[[Path], str]


class SourceFile(FrozenModel):
    """One file of a source: name relative to the source, size in bytes, and SHA-256."""

    name: str
    num_bytes: int
    sha256: str


class SourceRecord(FrozenModel):
    """What a source is made of; equal records give equal documents."""

    kind: str
    settings: dict[str, str | int]
    files: tuple[SourceFile, ...] = ()


class SourcePosition(FrozenModel):
    """How far a source was read: documents taken, counts so far, and a remote reader's state."""

    num_documents: int = 0
    rejected: dict[str, RejectCount] = Field(default_factory=dict)
    repaired: dict[str, RejectCount] = Field(default_factory=dict)
    remote: dict[str, Any] | None = None
    account: DataAccount | None = None


class Source(Protocol):
    """Documents in a fixed order; a local one is read again to resume, a remote one goes on."""

    tallies: Tallies

    def record(self, hash_of: HashOf) -> SourceRecord:
        """What the source is made of; `hash_of` gives the SHA-256 of a file."""

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the documents after `start`; a source that waits says so through `progress`.

        Raises:
            DataError: At the first thing that cannot be counted and passed over.
        """

    def remote_state(self) -> dict[str, Any] | None:
        """State that lets a remote source go on after the last document; None for local ones."""


def skip_documents(documents: Iterator[Document], count: int) -> Iterator[Document]:
    """Read past `count` documents, so that a local source counts its rejects again."""
    for _ in range(count):
        if next(documents, None) is None:
            return
    yield from documents


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file as hexadecimal digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASH_BYTES):
            digest.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return digest.hexdigest()
