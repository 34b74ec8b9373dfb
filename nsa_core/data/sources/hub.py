"""A data set streamed from the Hugging Face hub, with retries of our own and an exact place."""

import importlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nsa_core.data.documents import Document, RecordOrigin, Tallies, take_text
from nsa_core.data.prefetch import LoaderStalled, Prefetcher
from nsa_core.data.reporting import DataError, OnProgress, StageProgress, ignore_progress
from nsa_core.data.sources.source import HashOf, RemotePlace, SourcePosition, SourceRecord

#: Waits between tries; after the last one the staging stops, about five minutes after the first.
RETRY_WAITS_S = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
#: Waits where nothing was ever read: more likely no network than a passing outage.
FIRST_WAITS_S = RETRY_WAITS_S[:3]
#: A read without an answer is given up after this, like a failed one.
STALL_S = 120.0
#: Records that the reader's thread holds ready.
READ_AHEAD = 32
#: What passes and is no OSError; HTTP libraries, whichever of them `datasets` uses here.
PASSING_ERRORS = (
    ("datasets.exceptions", "DatasetsError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("aiohttp", "ClientError"),
    ("requests", "RequestException"),
)
#: Answers that another try will not change.
FINAL_ERRORS = (
    ("datasets.exceptions", "DatasetNotFoundError"),
    ("huggingface_hub.errors", "OfflineModeIsEnabled"),
    ("huggingface_hub.errors", "GatedRepoError"),
)
HINT = "the staged part is kept: start again to continue, or use data.source fineweb_edu_local"


class Stream(Protocol):
    """What is used of `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]:
        """Place after the last record, as JSON-able values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a place."""


def open_hub_stream(dataset: str, subset: str) -> Stream:
    """The training split of a data set, streamed."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        message = f"data.source fineweb_edu needs the package `datasets`: {error}"
        raise DataError(message, "install nsa-ops[train]") from error
    stream: Stream = datasets.load_dataset(dataset, name=subset, split="train", streaming=True)
    return stream


@dataclass(eq=False)
class HubSource:
    """Documents of a hub data set; waits for a network that fails, and gives up after a while."""

    dataset: str
    subset: str
    text_key: str
    open_stream: Callable[[str, str], Stream] = open_hub_stream
    sleep: Callable[[float], None] = time.sleep
    stall_s: float = STALL_S
    tallies: Tallies = field(default_factory=Tallies)
    _num_records: int = 0
    _place: dict[str, Any] | None = None

    def record(self, hash_of: HashOf) -> SourceRecord:
        """The names; what the hub holds under them is not hashed."""
        del hash_of  # there are no files
        settings: dict[str, str | int] = {
            "dataset": self.dataset,
            "subset": self.subset,
            "text_key": self.text_key,
        }
        return SourceRecord(kind="fineweb_edu", settings=settings)

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the documents after `start`.

        Raises:
            DataError: If the hub does not answer after all retries, does not have the data set,
                or its records have no text column.
        """
        self._go_to(start)
        for record in self._records(progress):
            origin = RecordOrigin(self.dataset, self._num_records)
            text = record.get(self.text_key)
            if isinstance(text, str):
                yield from take_text(text, origin, self.tallies)
            else:
                self._count_missing(record, origin)

    def remote_place(self) -> RemotePlace:
        """Number of records read, and the stream's own place."""
        return RemotePlace(num_records=self._num_records, place=self._place)

    def _go_to(self, start: SourcePosition) -> None:
        self.tallies.rejected.restore(start.rejected)
        self.tallies.repaired.restore(start.repaired)
        if start.account is not None:
            self.tallies.restore(start.account, self.dataset)
        if start.remote is not None:
            self._num_records = start.remote.num_records
            self._place = start.remote.place

    def _count_missing(self, record: Mapping[str, Any], origin: RecordOrigin) -> None:
        if self.text_key in record:
            self.tallies.reject(f"`{self.text_key}` is null or not a text", origin)
            return
        columns = ", ".join(f"`{name}`" for name in record)
        message = f"{self.dataset} has no column `{self.text_key}`; its columns are {columns}"
        raise DataError(message, "name the text column with data.text_key")

    def _records(self, progress: OnProgress) -> Iterator[Mapping[str, Any]]:
        """Yield records, opening the stream again at the same place after a failure."""
        final, passing = _find_errors(FINAL_ERRORS), _find_errors(PASSING_ERRORS)
        num_failures = 0
        while True:
            before = self._num_records
            pull = _Pull(self._open, (*final, *passing, OSError, EOFError, ValueError))
            reader = Prefetcher(pull, READ_AHEAD, self.stall_s)
            try:
                failure = yield from self._drain(reader, progress)
            finally:
                reader.close(wait_s=0)
            if failure is None:
                return
            if isinstance(failure, DataError) and not isinstance(failure, LoaderStalled):
                raise failure
            if isinstance(failure, final):
                message = f"the hub has no {self.dataset} ({self.subset}) for us: {failure}"
                raise DataError(message, "correct data.path, log in, or go online") from failure
            num_failures = 1 if self._num_records > before else num_failures + 1
            self._wait(num_failures, failure, progress)

    def _drain(
        self, reader: "Prefetcher[_Pulled]", progress: OnProgress
    ) -> Generator[Mapping[str, Any], None, Exception | None]:
        """Yield what the reader reads, and return what ended it; None at the end of the data."""

        def report() -> None:
            progress(StageProgress("tokenise", self._num_records, detail="reading from the hub"))

        while True:
            try:
                pulled = reader.next(report)
            except LoaderStalled as stalled:
                return stalled
            if pulled.record is None:
                return pulled.failure
            self._place = pulled.place
            self._num_records += 1
            yield pulled.record

    def _open(self) -> Stream:
        """The stream at its place."""
        try:
            stream = self.open_stream(self.dataset, self.subset)
        except DataError:
            raise
        except ValueError as error:  # `datasets` names the subsets there are
            message = f"{self.dataset} ({self.subset}) cannot be opened: {error}"
            raise DataError(message, "correct data.path or data.subset") from error
        if self._place is not None:
            stream.load_state_dict(self._place)
        return stream

    def _wait(self, num_failures: int, failure: Exception, progress: OnProgress) -> None:
        """Wait in seconds, so that `progress` can stop it."""
        waits_s = RETRY_WAITS_S if self._num_records else FIRST_WAITS_S
        if num_failures > len(waits_s):
            message = (
                f"{self.dataset} did not answer in {num_failures} tries over "
                f"{sum(waits_s)} s, after record {self._num_records}: {failure}"
            )
            raise DataError(message, HINT) from failure
        for left_s in range(waits_s[num_failures - 1], 0, -1):
            why = f"{type(failure).__name__}: {failure}"[:200]
            detail = f"data stalled, try {num_failures + 1} in {left_s} s; {why}"
            progress(StageProgress("wait", self._num_records, detail=detail))
            self.sleep(1)


@dataclass(frozen=True)
class _Pulled:
    """A record and the place after it, or what ended the stream (nothing at its end)."""

    record: Mapping[str, Any] | None
    place: dict[str, Any] | None = None
    failure: Exception | None = None


class _Pull:
    """Opens a stream and reads one record a call; runs in the reader's thread."""

    def __init__(
        self, open_stream: Callable[[], Stream], errors: tuple[type[Exception], ...]
    ) -> None:
        self._open_stream = open_stream
        self._errors = errors
        self._stream: Stream | None = None
        self._records: Iterator[Mapping[str, Any]] = iter(())

    def __call__(self, number: int) -> _Pulled:
        del number
        try:
            if self._stream is None:
                self._stream = self._open_stream()
                self._records = iter(self._stream)
            record = next(self._records, None)
        except self._errors as failure:
            return _Pulled(None, failure=failure)
        return _Pulled(record, self._stream.state_dict())


def _find_errors(names: tuple[tuple[str, str], ...]) -> tuple[type[Exception], ...]:
    """The exception types that exist here; a library that is not installed raises nothing."""
    found: list[type[Exception]] = []
    for module, name in names:
        try:
            found.append(getattr(importlib.import_module(module), name))
        except ImportError:
            continue
    return tuple(found)
