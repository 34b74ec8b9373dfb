"""Every file of the shared text cases does what its index says."""

import gzip
from pathlib import Path

import pytest

from nsa_core.data.documents import Document
from nsa_core.data.reporting import DataError
from nsa_core.data.sources.local import LocalSource
from nsa_core.data.sources.source import SourcePosition
from nsa_core.data.sources.text_files import LineRejected, parse_json
from nsa_core.data.staging import stage
from tests.core.data.conftest import local


def read(path: Path, text_key: str = "text") -> tuple[list[Document], LocalSource]:
    source = LocalSource(path, text_key)
    return list(source.documents(SourcePosition())), source


def counts(source: LocalSource) -> dict[str, int]:
    return source.tallies.rejected.counts


def test_every_case_file_has_a_test(cases: Path) -> None:
    tested = Path(__file__).read_text()
    untested = [path.name for path in cases.iterdir() if path.name not in tested]
    assert not untested


@pytest.mark.parametrize("name", ["T01_tinyshakespeare.txt", "T02_asyoulik.txt"])
def test_a_text_file_is_cut_into_documents_and_nothing_is_lost(cases: Path, name: str) -> None:
    documents, source = read(cases / name)
    assert "".join(document.text for document in documents) == (cases / name).read_text()
    assert 15 <= len(documents) <= 40
    assert not counts(source)


def test_plain_gzip_and_zstd_give_the_same_ten_documents(cases: Path) -> None:
    plain, source = read(cases / "T03_dolma_layout.jsonl")
    assert len(plain) == 10
    assert not counts(source)
    for name in ("T04_dolma.jsonl.gz", "T06_dolma.jsonl.zst"):
        found, _ = read(cases / name)
        assert [document.text for document in found] == [document.text for document in plain]


def test_six_documents_before_a_gzip_cut_load_then_a_stop_names_file_and_byte(cases: Path) -> None:
    path = cases / "T05_gzip_truncated_midstream.jsonl.gz"
    whole, _ = read(cases / "T04_dolma.jsonl.gz")
    documents = LocalSource(path, "text").documents(SourcePosition())
    found = [next(documents) for _ in range(6)]
    assert [document.text for document in found] == [document.text for document in whole[:6]]
    with pytest.raises(DataError, match=rf"{path.name} ends at byte 10348 .* after 6 whole lines"):
        next(documents)


def test_long_latex_lines_load(cases: Path) -> None:
    documents, source = read(cases / "T07_arxiv_long_lines.jsonl")
    assert len(documents) == 12
    assert max(len(document.text) for document in documents) > 100_000
    assert not counts(source)


def test_strict_json_agrees_with_the_json_test_suite(cases: Path) -> None:
    table = (cases / "T09_jsontestsuite_manifest.tsv").read_text().splitlines()[1:]
    lines = (cases / "T09_jsontestsuite_one_per_line.jsonl").read_bytes().split(b"\n")
    for row in table:
        number, name, expected = row.split("\t")
        try:
            parse_json(lines[int(number) - 1])
            parsed = "y"
        except LineRejected:
            parsed = "n"
        assert expected in (parsed, "i"), name


def test_every_line_of_the_json_test_suite_is_counted(cases: Path) -> None:
    path = cases / "T09_jsontestsuite_one_per_line.jsonl"
    documents, source = read(path)
    assert not documents
    assert sum(counts(source).values()) == len(path.read_bytes().removesuffix(b"\n").split(b"\n"))
    assert counts(source)["not UTF-8"] >= 5


def test_deep_nesting_is_refused_and_counted(cases: Path) -> None:
    documents, source = read(cases / "T10_100000_opening_arrays_single_line.jsonl")
    assert not documents
    assert sum(counts(source).values()) == 1


def test_byte_order_mark_and_crlf_lose_nothing_and_leave_no_carriage_return(cases: Path) -> None:
    documents, source = read(cases / "T11_utf8_bom_crlf.jsonl")
    assert len(documents) == 4
    assert documents[0].origin.line == 1
    assert not any("\r" in document.text or "\ufeff" in document.text for document in documents)
    assert not counts(source)


def test_empty_null_missing_and_cut_lines_are_counted_with_their_lines(cases: Path) -> None:
    name = "T13_empty_null_missing_key_cut_line.jsonl"
    documents, source = read(cases / name)
    assert [document.origin.line for document in documents] == [1, 6]
    assert source.tallies.rejected.origins == {
        "empty text": [f"{name}:2"],
        "`text` is null": [f"{name}:3"],
        "no key `text`": [f"{name}:4"],
        "malformed JSON": [f"{name}:5"],
    }


def test_parquet_without_a_text_column_names_its_columns(cases: Path) -> None:
    with pytest.raises(DataError, match=r"no column `text`; its columns are `b_struct`"):
        read(cases / "T14_nulls.snappy.parquet")


def test_a_corrupt_parquet_page_is_a_stop(cases: Path) -> None:
    with pytest.raises(DataError, match=r"T14_corrupt_page_checksum.parquet"):
        read(cases / "T14_corrupt_page_checksum.parquet")


def test_a_fineweb_record_loads(cases: Path) -> None:
    documents, _ = read(cases / "T15_fineweb_format_one_record.jsonl")
    assert documents[0].text.startswith("|Viewing Single Post From")


def test_one_document_alone_cannot_be_staged_and_says_why(cases: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 distinct document"):
        stage(local(cases / "T15_fineweb_format_one_record.jsonl"), tmp_path, 0)


def test_a_staged_corpus_decodes_to_its_text(cases: Path, tmp_path: Path) -> None:
    staged = stage(local(cases / "T04_dolma.jsonl.gz"), tmp_path, 0)
    ids = [*staged.train.read(0, len(staged.train)), *staged.validation.read(0, 10**9)]
    texts = gzip.decompress((cases / "T04_dolma.jsonl.gz").read_bytes()).count(b"\n")
    assert ids.count(staged.tokenizer.end_id) == texts
