"""Staging is whole or not there, goes on after a kill, and its two splits share no text."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest

from nsa_core.data.build import BuildJob, batch_documents, build_folder
from nsa_core.data.documents import Document, RecordOrigin
from nsa_core.data.reporting import DataError, StageProgress, ignore_progress
from nsa_core.data.shards import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    SplitTokens,
    read_hashes,
    read_manifest,
)
from nsa_core.data.staged_before import StagedBefore
from nsa_core.data.staging import folder_lock, open_staged, plan_staging, stage
from tests.core.data.conftest import local


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def write_corpus(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_come_back_whole_each_with_an_end_token(corpus: Path, tmp_path: Path) -> None:
    staged = stage(local(corpus), tmp_path, 0)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    found = []
    for row in (staged.train, staged.validation):
        ids = row.read(0, len(row))
        ends = np.flatnonzero(ids == staged.tokenizer.end_id)
        assert ends[-1] == len(ids) - 1
        found += [staged.tokenizer.decode(part.tolist()) for part in np.split(ids, ends + 1)[:-1]]
    assert sorted(found) == sorted(texts)


def test_no_text_is_in_both_splits_even_if_it_is_there_twice(tmp_path: Path) -> None:
    texts = [f"text {n % 30}" for n in range(90)]
    staged = stage(local(write_corpus(tmp_path / "c.jsonl", texts)), tmp_path, 0)
    shards = staged.manifest.shards
    train = read_hashes(staged.folder, [s for s in shards if s.split == "train"])
    held_out = read_hashes(staged.folder, [s for s in shards if s.split == "validation"])
    assert train.isdisjoint(held_out)
    assert len(train) + len(held_out) == 30
    assert max(held_out) < bytes.fromhex(staged.manifest.validation_threshold) <= min(train)
    assert sum(shard.num_documents for shard in shards) == 90


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_a_small_corpus_gets_a_document_on_both_sides(tmp_path: Path, fraction: float) -> None:
    path = write_corpus(tmp_path / "c.jsonl", [f"text {n}" for n in range(4)])
    staged = stage(local(path, validation_fraction=fraction), tmp_path, 0)
    documents = {split: staged.manifest.total(split)[1] for split in ("train", "validation")}
    assert sorted(documents.values()) == [1, 3]


def test_the_second_staging_reuses_the_first(corpus: Path, tmp_path: Path) -> None:
    first = stage(local(corpus), tmp_path, 0)
    modified = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    assert not (first.folder / JOURNAL_NAME).exists()
    second = stage(local(corpus), tmp_path, 0)
    assert {path: path.stat().st_mtime_ns for path in second.folder.iterdir()} == modified


def test_changed_text_is_staged_beside_the_old(corpus: Path, tmp_path: Path) -> None:
    first = stage(local(corpus), tmp_path, 0)
    corpus.write_text(corpus.read_text() + json.dumps({"text": "one more"}) + "\n")
    second = stage(local(corpus), tmp_path, 0)
    assert second.folder != first.folder
    assert first.folder.is_dir()


@pytest.mark.parametrize(
    "changes",
    [{"validation_fraction": 0.5}, {"max_tokens": 500}, {"tokenizer": "bpe"}, {"text_key": "body"}],
)
def test_shards_of_other_settings_are_not_those_that_a_run_began_with(
    corpus: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = stage(local(corpus), tmp_path, 0).folder
    assert StagedBefore(local(corpus), 0, folder).fits
    assert not StagedBefore(local(corpus, **changes), 0, folder).fits


def test_text_that_changes_while_it_is_staged_is_refused_and_staged_anew(
    corpus: Path, tmp_path: Path
) -> None:
    before = corpus.read_text()

    def write_on(progress: StageProgress) -> None:
        if progress.doing == "tokenise":
            corpus.write_text(before + json.dumps({"text": "one more"}) + "\n")

    with pytest.raises(DataError, match=r"changed while it was staged: corpus\.jsonl has changed"):
        stage(local(corpus), tmp_path, 0, write_on)
    corpus.write_text(before)
    expected = stage(local(corpus, cache_dir="other"), tmp_path, 0)
    assert content(stage(local(corpus), tmp_path, 0).folder) == content(expected.folder)


def test_the_same_text_elsewhere_gives_the_same_manifest(corpus: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / corpus.name
    copied.parent.mkdir()
    shutil.copy(corpus, copied)
    first = stage(local(corpus), tmp_path / "a", 0)
    second = stage(local(copied), tmp_path / "b", 1)
    assert second.manifest_sha256 == first.manifest_sha256


def job(config, root, progress=ignore_progress) -> BuildJob:
    plan = plan_staging(config, 0)
    return BuildJob(config, 0, plan, root / "staged", progress, shard_tokens=1000)


def test_small_shards_read_as_one_row(corpus: Path, tmp_path: Path) -> None:
    config = local(corpus, document_batch=2)
    build_folder(job(config, tmp_path))
    many = open_staged(tmp_path / "staged")
    one = stage(config, tmp_path, 0)
    assert len(many.manifest.shards) > 5
    assert np.array_equal(many.train.read(0, len(many.train)), one.train.read(0, len(one.train)))
    for start in range(0, len(many.train), 777):
        expected = one.train.read(start, start + 2000)
        assert np.array_equal(many.train.read(start, start + 2000), expected)


@pytest.mark.parametrize(("max_tokens", "is_known"), [(0, False), (4000, True)])
def test_staging_reports_its_share_where_its_end_is_known(
    corpus: Path, tmp_path: Path, max_tokens: int, is_known: bool
) -> None:
    told = []
    build_folder(job(local(corpus, document_batch=2, max_tokens=max_tokens), tmp_path, told.append))
    shares = [one.share for one in told if one.doing == "tokenise"]
    assert len(shares) > 2
    if is_known:
        assert shares == sorted(shares)
        assert shares[0] < 1.0 == shares[-1]
    else:
        assert set(shares) == {None}


@pytest.mark.parametrize("at_write", range(1, 24))
def test_a_kill_at_any_write_leaves_nothing_torn_and_the_next_staging_ends_the_same(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_write: int
) -> None:
    """Dies between a temporary file and its rename, at every write of the staging in turn."""
    config = local(corpus, document_batch=4)
    (tmp_path / "whole").mkdir()
    build_folder(job(config, tmp_path / "whole"))
    renames = 0
    real_replace = type(tmp_path).replace

    def replace(self, target):
        nonlocal renames
        renames += 1
        if renames == at_write:
            raise Killed
        return real_replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "replace", replace)
        try:
            build_folder(job(config, tmp_path))
        except Killed:
            assert not (tmp_path / "staged").exists()
            build_folder(job(config, tmp_path))
    assert content(tmp_path / "staged") == content(tmp_path / "whole" / "staged")


def test_a_stop_through_progress_keeps_the_shards_that_are_done(
    corpus: Path, tmp_path: Path
) -> None:
    config = local(corpus, document_batch=2)
    reports = []

    def stop(progress) -> None:
        reports.append(progress)
        if progress.num_documents == 30:
            raise Killed

    with pytest.raises(Killed):
        build_folder(job(config, tmp_path, stop))
    reports.clear()
    build_folder(job(config, tmp_path, reports.append))
    first = next(report for report in reports if report.doing == "tokenise")
    assert first.num_documents > 20


def test_max_tokens_stops_after_whole_documents_whatever_the_batch(
    corpus: Path, tmp_path: Path
) -> None:
    found = set()
    for number, document_batch in enumerate((1, 3, 64)):
        config = local(corpus, max_tokens=3000, document_batch=document_batch)
        staged = stage(config, tmp_path / str(number), 0)
        total = staged.manifest.total("train")[0] + staged.manifest.total("validation")[0]
        assert 3000 <= total < 4000
        found.add(staged.train.read(0, 10**6).tobytes())
    assert len(found) == 1


def test_a_flipped_bit_in_a_shard_is_refused(corpus: Path, tmp_path: Path) -> None:
    staged = stage(local(corpus), tmp_path, 0)
    path = next(staged.folder.glob("train_*.tokens.npy"))
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"train_00000.tokens.npy has SHA-256"):
        stage(local(corpus), tmp_path, 0)


def test_a_missing_shard_and_a_damaged_manifest_are_refused(corpus: Path, tmp_path: Path) -> None:
    folder = stage(local(corpus), tmp_path, 0).folder
    shard = next(folder.glob("train_*.tokens.npy"))
    shard.rename(tmp_path / "aside")
    with pytest.raises(DataError, match="cannot be read"):
        open_staged(folder)
    with pytest.raises(DataError, match="cannot be opened"):
        SplitTokens(folder, read_manifest(folder)[0].shards)
    (folder / MANIFEST_NAME).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        open_staged(folder)
    with pytest.raises(DataError, match="no staged data"):
        open_staged(tmp_path / "nowhere")


def test_the_manifest_lists_what_was_left_out(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text() + '{"text": ""}\nno json\n')
    staged = stage(local(corpus, max_dropped=0.1), tmp_path, 0)
    assert staged.manifest.rejected["empty text"].origins == ("corpus.jsonl:41",)
    assert staged.manifest.rejected["malformed JSON"].count == 1
    (source_file,) = staged.manifest.plan.source.files
    assert source_file.num_bytes == corpus.stat().st_size


@pytest.mark.parametrize("texts", [[], ["", " \n"]])
def test_a_source_without_text_is_a_clear_error(tmp_path: Path, texts) -> None:
    path = write_corpus(tmp_path / "c.jsonl", texts)
    with pytest.raises(DataError, match="holds no text"):
        stage(local(path), tmp_path, 0)


def test_equal_documents_alone_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 distinct document"):
        stage(local(write_corpus(tmp_path / "c.jsonl", ["same"] * 9)), tmp_path, 0)


def test_a_folder_that_cannot_be_written_is_a_data_error(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the cache folder should be")
    with pytest.raises(DataError, match="cannot stage into"):
        stage(local(corpus), tmp_path, 0)


def test_a_full_disk_is_a_data_error_that_says_so(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_) -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nsa_core.data.shards.write_bytes", full)
    with pytest.raises(DataError, match=r"No space left on device; Free space"):
        stage(local(corpus), tmp_path, 0)


def test_synthetic_words_take_the_place_of_missing_data_only_when_asked_and_say_so(
    tmp_path: Path,
) -> None:
    config = local(tmp_path / "missing")
    with pytest.raises(DataError, match="does not exist"):
        stage(config, tmp_path, 0)
    staged = stage(config.model_copy(update={"synthetic_on_fail": True}), tmp_path, 0)
    assert staged.substituted_synthetic
    assert "does not exist" in staged.substitution_reason
    assert staged.manifest.plan.source.kind == "synthetic"


def test_batches_of_documents_are_short_where_texts_are_long() -> None:
    documents = [Document("x" * 3_000_000, RecordOrigin("f", n)) for n in range(5)]
    assert [len(batch) for batch in batch_documents(iter(documents), 64)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("doing", "report"),
    [("hash", 1), ("tokenizer", 1), ("tokenizer", 9), ("tokenise", 1), ("verify", 1)],
)
def test_every_part_of_a_staging_can_be_stopped(
    corpus: Path, tmp_path: Path, doing: str, report: int
) -> None:
    """The ninth report of `tokenizer` comes from within the training of the BPE."""
    config = local(corpus, tokenizer="bpe", bpe_vocab_size=300)
    reports = []

    def stop(progress) -> None:
        reports.append(progress.doing)
        if reports.count(doing) == report:
            raise Killed

    with pytest.raises(Killed):
        stage(config, tmp_path, 0, stop)
    assert stage(config, tmp_path, 0).manifest.shards


def test_a_second_process_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "lock", ignore_progress):

        def stop(progress) -> Never:
            assert progress.doing == "wait"
            raise Killed

        with pytest.raises(Killed), folder_lock(tmp_path / "lock", stop):
            pytest.fail("two held one lock")
    with folder_lock(tmp_path / "lock", stop):
        pass
