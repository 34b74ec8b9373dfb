"""Source: where documents come from, in an order that never changes, and what it is made of."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from nsa_core.config.base import FrozenModel
from nsa_core.data.documents import Document, RejectCount, Tallies
from nsa_core.data.reporting import OnProgress, ignore_progress
from nsa_core.rundir.data_account import DataAccount

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


class RemotePlace(FrozenModel):
    """Records that were read of a remote source, and its stream's own place after the last one."""

    num_records: int
    place: dict[str, Any] | None


class SourcePosition(FrozenModel):
    """How far a source was read: documents taken, counts so far, and a remote reader's place."""

    num_documents: int = 0
    rejected: dict[str, RejectCount] = Field(default_factory=dict)
    repaired: dict[str, RejectCount] = Field(default_factory=dict)
    remote: RemotePlace | None = None
    account: DataAccount | None = None


class Source(Protocol):
    """Documents in a fixed order; to resume, a local one is read again, a remote one continued."""

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

    def remote_place(self) -> RemotePlace | None:
        """Where a remote source continues after the last document; None for local ones."""


class ReadAgain:
    """A source on this machine: to resume, it is read again and counts its rejects again."""

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the documents after `start`, having read past those before it."""
        del progress  # a local source does not wait
        return islice(self.all_documents(), start.num_documents, None)

    def remote_place(self) -> None:
        """A local source has none."""

    def all_documents(self) -> Iterator[Document]:
        """Yield the documents from the first one on."""
        raise NotImplementedError
