"""Build token shards in a partial folder with a journal, then publish it by a rename."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from nsa_core.config.training import DataConfig
from nsa_core.data.documents import (
    MIN_RECORDS,
    Document,
    Tallies,
    require_text,
    require_within_limits,
)
from nsa_core.data.ids import Ids
from nsa_core.data.reporting import DataError, OnProgress, StageProgress
from nsa_core.data.shards import (
    ACCOUNT_NAME,
    JOURNAL_NAME,
    SHARD_TOKENS,
    ShardBuffer,
    ShardRecord,
    Split,
    StagedManifest,
    StagingJournal,
    StagingPlan,
    dtype_name,
    older_account,
    read_hashes,
    write_manifest,
)
from nsa_core.data.sources.make import make_source
from nsa_core.data.sources.source import HashOf, SourcePosition
from nsa_core.data.staged_before import describe_files
from nsa_core.data.tokenizer import describe_tokenizer, load_tokenizer, make_tokenizer
from nsa_core.rundir.atomic import fsync_dir, write_text
from nsa_core.rundir.checkpoint import hash_file
from nsa_core.rundir.data_account import DataAccount

#: Text that is tokenised at a time is at most about this long, whatever `document_batch` says.
MAX_BATCH_CHARACTERS = 4 * 2**20
SPLITS: tuple[Split, ...] = ("train", "validation")
#: Records after which too much dropped ends a staging that no shard interrupts: some seconds.
JUDGED_EVERY = 100_000
HASH_BYTES = 32


@dataclass(frozen=True)
class BuildJob:
    """What is built and where."""

    config: DataConfig
    seed: int
    plan: StagingPlan
    folder: Path
    progress: OnProgress
    shard_tokens: int = SHARD_TOKENS
    hash_of: HashOf = hash_file

    @property
    def partial(self) -> Path:
        """The folder that is renamed to `folder` when it is complete."""
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def name(self) -> str:
        """The data as messages name it."""
        return self.config.path or self.config.source


def build_folder(job: BuildJob) -> None:
    """Stage all documents of a source; continue a partial folder of the same plan.

    Raises:
        DataError: If the source holds no text, stops at something it cannot pass over, or has
            changed meanwhile.
        OSError: If the disk is full or not writable.
    """
    journal = _read_journal(job)
    if journal is None:
        journal = _begin(job, first_threshold(job.config.validation_fraction))
    while True:
        journal = _Stager(job, journal).run()
        account = _account_of(journal)
        require_text(job.name, account)
        require_within_limits(job.name, account, job.config)
        threshold = _missing_split(job, journal)
        if threshold is None:
            break
        journal = _begin(job, threshold)
    _refuse_changed(job)
    _publish(job, journal)


class _Stager:
    """Tokenises documents into buffers and commits them as shards, with the journal last."""

    def __init__(self, job: BuildJob, journal: StagingJournal) -> None:
        self._job = job
        self._journal = journal
        self._tokenizer = load_tokenizer(journal.tokenizer.name, job.partial)
        self._source = make_source(job.config, job.seed)
        self._source.tallies.look = lambda: _look(job, self._source.tallies, self._report)
        self._num_documents = journal.position.num_documents
        self._num_tokens = sum(shard.num_tokens for shard in journal.shards)
        self._buffers = {split: self._new_buffer(split) for split in SPLITS}

    def run(self) -> StagingJournal:
        """Stage from the journal's position to the end of the source, or to `max_tokens`."""
        if self._is_full():
            return self._journal
        documents = self._source.documents(self._journal.position, self._job.progress)
        for batch in batch_documents(documents, self._job.config.document_batch):
            self._add_batch(batch)
            self._report()
            if self._is_full():
                break
            if max(b.num_tokens for b in self._buffers.values()) >= self._job.shard_tokens:
                self._commit()
                _refuse_early(self._job, self._source.tallies)
        self._commit()
        return self._journal

    def _add_batch(self, batch: list[Document]) -> None:
        rows = self._tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, rows, strict=True):
            if not self._is_full():
                self._add(document, ids)

    def _add(self, document: Document, ids: Ids) -> None:
        found_hash, num_bytes = content_hash(document.text)
        is_held_out = is_validation(found_hash, bytes.fromhex(self._journal.validation_threshold))
        self._buffers["validation" if is_held_out else "train"].add(ids, found_hash, num_bytes)
        self._num_documents += 1
        self._num_tokens += len(ids) + 1

    def _is_full(self) -> bool:
        limit = self._job.config.max_tokens
        return 0 < limit <= self._num_tokens

    def _commit(self) -> None:
        """Write what is buffered, then say so in the journal; a kill in between repeats it."""
        shards = list(self._journal.shards)
        for split, buffer in self._buffers.items():
            if buffer.num_tokens:
                shards.append(buffer.write(self._job.partial, _count(shards, split)))
                self._buffers[split] = self._new_buffer(split)
        position = SourcePosition(
            num_documents=self._num_documents,
            rejected=self._source.tallies.rejected.freeze(),
            repaired=self._source.tallies.repaired.freeze(),
            remote=self._source.remote_place(),
            account=self._source.tallies.account(),
        )
        update = {"shards": tuple(shards), "position": position}
        self._journal = self._journal.model_copy(update=update)
        _write_journal(self._job, self._journal)

    def _report(self) -> None:
        limit, done = self._job.config.max_tokens, self._num_tokens
        share = min(1.0, done / limit) if limit > 0 else None
        progress = StageProgress("tokenise", self._num_documents, done, self._job.name, share)
        self._job.progress(progress)

    def _new_buffer(self, split: Split) -> ShardBuffer:
        dtype = np.dtype(dtype_name(self._tokenizer.vocab_size))
        return ShardBuffer(split, self._tokenizer.end_id, dtype)


def batch_documents(documents: Iterator[Document], count: int) -> Iterator[list[Document]]:
    """Lists of at most `count` documents, shorter where their text is long."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if len(batch) >= count or num_characters >= MAX_BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _begin(job: BuildJob, threshold: bytes) -> StagingJournal:
    """Empty the partial folder, and make or train the tokenizer into it."""
    if job.partial.exists():
        shutil.rmtree(job.partial)
    job.partial.mkdir()
    job.progress(StageProgress("tokenizer", detail=job.config.tokenizer))
    tokenizer = make_tokenizer(job.config, _training_texts(job, threshold))
    tokenizer.save(job.partial)
    journal = StagingJournal(
        plan=job.plan,
        tokenizer=describe_tokenizer(tokenizer),
        validation_threshold=threshold.hex(),
    )
    _write_journal(job, journal)
    return journal


def _training_texts(job: BuildJob, threshold: bytes) -> Iterator[str]:
    """The texts that a tokenizer may be trained on: never a held-out one."""
    source = make_source(job.config, job.seed)
    going_on = StageProgress("tokenizer", detail=job.config.tokenizer)
    source.tallies.look = lambda: _look(job, source.tallies, lambda: job.progress(going_on))
    for document in source.documents(SourcePosition(), job.progress):
        job.progress(going_on)
        if not is_validation(content_hash(document.text)[0], threshold):
            yield document.text


def _read_journal(job: BuildJob) -> StagingJournal | None:
    """The journal of an interrupted staging; None where there is none that can be used."""
    try:
        return StagingJournal.model_validate_json((job.partial / JOURNAL_NAME).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _write_journal(job: BuildJob, journal: StagingJournal) -> None:
    write_text(job.partial / JOURNAL_NAME, journal.model_dump_json())


def _missing_split(job: BuildJob, journal: StagingJournal) -> bytes | None:
    """A threshold that gives both splits a document, where one has none; None where both have."""
    present = {shard.split for shard in journal.shards}
    if len(present) == len(SPLITS):
        return None
    hashes = read_hashes(job.partial, journal.shards)
    return moved_threshold(min(hashes), max(hashes), has_validation="validation" in present)


def _refuse_changed(job: BuildJob) -> None:
    """Drop tokens of files that were written since they were hashed: their name would be wrong."""
    before = job.plan.source
    if not before.files:
        return
    now = make_source(job.config, job.seed).record(job.hash_of)
    if now == before:
        return
    shutil.rmtree(job.partial)
    message = f"{job.name} changed while it was staged: {'; '.join(describe_files(before, now))}"
    raise DataError(message, "start again once nothing writes into it any more")


def _publish(job: BuildJob, journal: StagingJournal) -> None:
    manifest = StagedManifest(
        plan=journal.plan,
        tokenizer=journal.tokenizer,
        dtype=dtype_name(journal.tokenizer.vocab_size),
        shards=journal.shards,
        rejected=journal.position.rejected,
        repaired=journal.position.repaired,
        validation_threshold=journal.validation_threshold,
    )
    account = _account_of(journal)
    write_text(job.partial / ACCOUNT_NAME, account.model_dump_json(indent=1) + "\n")
    write_manifest(job.partial, manifest)
    _remove_leftovers(job.partial)
    fsync_dir(job.partial)
    job.partial.rename(job.folder)
    fsync_dir(job.folder.parent)
    (job.folder / JOURNAL_NAME).unlink()  # last: until the rename a kill must find its place here


def _look(job: BuildJob, tallies: Tallies, report: Callable[[], None]) -> None:
    """Report progress, and stop where too much of the source is dropped."""
    report()
    if tallies.num_seen % JUDGED_EVERY == 0:
        _refuse_early(job, tallies)


def _refuse_early(job: BuildJob, tallies: Tallies) -> None:
    """Stop a long staging that drops too much; a file that is still read is not judged whole."""
    if tallies.num_documents + tallies.num_lost >= MIN_RECORDS:
        require_within_limits(job.name, tallies.account(goes_on=True), job.config)


def _account_of(journal: StagingJournal) -> DataAccount:
    return journal.position.account or older_account(journal)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a write that was killed."""
    for path in folder.glob(".*"):
        path.unlink()


def _count(shards: list[ShardRecord], split: Split) -> int:
    return sum(shard.split == split for shard in shards)


def content_hash(text: str) -> tuple[bytes, int]:
    """SHA-256 of a text in UTF-8, and its length in bytes."""
    content = text.encode()
    return hashlib.sha256(content).digest(), len(content)


def first_threshold(validation_fraction: float) -> bytes:
    """The bound below which this share of all hashes lies."""
    return int(validation_fraction * 2**64).to_bytes(8, "big") + bytes(HASH_BYTES - 8)


def is_validation(document_hash: bytes, threshold: bytes) -> bool:
    """Equal texts have equal hashes, so they never stand on both sides."""
    return document_hash < threshold


def moved_threshold(lowest: bytes, highest: bytes, *, has_validation: bool) -> bytes:
    """A bound with documents on both sides, where a small corpus fell wholly to one.

    Raises:
        DataError: If all documents are equal, so that none can be held out.
    """
    if lowest == highest:
        message = "the data holds 1 distinct document, and validation needs one of its own"
        raise DataError(message, "add documents, or cut the text into several")
    if has_validation:
        return highest
    return (int.from_bytes(lowest, "big") + 1).to_bytes(HASH_BYTES, "big")
