"""A shard holds its documents, where they begin, their hashes and their sizes, in a small type."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from nsa_core.data.reporting import DataError
from nsa_core.data.shards import ShardBuffer, SplitTokens, dtype_name
from nsa_core.data.staging import stage
from tests.core.data.conftest import local

END = 9


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(257, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")]
)
def test_ids_have_the_smallest_type_that_holds_the_last_of_them(vocab_size: int, name: str) -> None:
    assert dtype_name(vocab_size) == name
    assert np.iinfo(name).max >= vocab_size - 1


@pytest.fixture
def written(tmp_path: Path):
    """A shard of documents of 2, 0 and 3 tokens that stand for 7, 0 and 4 bytes."""
    buffer = ShardBuffer("train", END, np.dtype("uint16"))
    for ids, size in (([1, 2], 7), ([], 0), ([3, 4, 5], 4)):
        buffer.add(np.asarray(ids, dtype=np.uint32), hashlib.sha256(bytes(ids)).digest(), size)
    return tmp_path, buffer.write(tmp_path, 3)


def test_a_shard_says_how_much_it_holds(written) -> None:
    _, record = written
    assert (record.split, record.name) == ("train", "train_00003")
    assert (record.num_tokens, record.num_documents, record.num_text_bytes) == (8, 3, 11)


def test_documents_stand_in_a_row_each_with_an_end_and_their_starts(written) -> None:
    folder, record = written
    tokens = np.load(folder / f"{record.name}.tokens.npy")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [1, 2, END, END, 3, 4, 5, END]
    assert np.load(folder / f"{record.name}.starts.npy").tolist() == [0, 3, 4]
    hashes = np.load(folder / f"{record.name}.hashes.npy")
    assert [row.tobytes() for row in hashes] == [
        hashlib.sha256(bytes(ids)).digest() for ids in ([1, 2], [], [3, 4, 5])
    ]


def test_the_hashes_of_a_shard_are_those_of_its_files(written) -> None:
    folder, record = written
    assert record.sha256 == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
    }


def test_a_shard_of_another_size_than_its_record_is_refused(written) -> None:
    folder, record = written
    with pytest.raises(DataError, match="has 8 tokens, not 7"):
        SplitTokens(folder, [record.model_copy(update={"num_tokens": 7})])


def test_a_shard_that_is_cut_while_it_is_read_is_an_error_and_no_end_of_the_process(
    written,
) -> None:
    folder, record = written
    tokens = SplitTokens(folder, [record])
    assert tokens.read(0, 3).tolist() == [1, 2, END]
    os.truncate(folder / f"{record.name}.tokens.npy", 130)
    with pytest.raises(DataError, match=r"train_00003\.tokens\.npy was cut after it was opened"):
        tokens.read(0, 3)


def test_any_part_of_several_shards_reads_as_one_row(tmp_path: Path) -> None:
    rows, records = [], []
    for number, length in enumerate((3, 1, 5)):
        buffer = ShardBuffer("train", END, np.dtype("uint16"))
        buffer.add(np.arange(length, dtype=np.uint32) + 10 * number, bytes(32), length)
        rows += [*range(10 * number, 10 * number + length), END]
        records.append(buffer.write(tmp_path, number))
    tokens = SplitTokens(tmp_path, records)
    assert len(tokens) == len(rows)
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 3):
            found = tokens.read(start, stop)
            assert found.dtype == np.int64
            assert found.tolist() == rows[start:stop]


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_the_share_of_held_out_documents_is_decided_by_their_hashes(
    tmp_path: Path, fraction: float
) -> None:
    path = tmp_path / "c.jsonl"
    texts = [f"document {number}" for number in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    staged = stage(local(path, validation_fraction=fraction), tmp_path, 0)
    shares = [int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) / 2**64 for t in texts]
    expected = [text for text, share in zip(texts, shares, strict=True) if share < fraction]
    row = staged.validation.read(0, len(staged.validation))
    held_out = bytes(row[row != staged.tokenizer.end_id].tolist()).decode()
    assert held_out == "".join(expected)
    assert staged.manifest.total("validation")[1] == len(expected)
