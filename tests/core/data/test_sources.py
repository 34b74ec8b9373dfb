"""Each kind of file gives its documents, and hostile ones a count or a clear stop."""

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.data import documents
from nsa_core.data.documents import MAX_NAMED_ORIGINS, RecordOrigin, RejectTally, Tallies, take_text
from nsa_core.data.lines import MAX_LINE_BYTES, read_lines
from nsa_core.data.reporting import DataError
from nsa_core.data.sources.local import LocalSource
from nsa_core.data.sources.make import StdlibSource, SyntheticSource
from nsa_core.data.sources.source import SourcePosition
from nsa_core.data.sources.text_files import cut_position, piece_bytes, read_plain
from nsa_core.rundir.checkpoint import hash_file


def read(path, text_key: str = "text"):
    source = LocalSource(path, text_key)
    return [document.text for document in source.documents(SourcePosition())], source


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_a_huge_line_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(jsonl(["before"]))
        for _ in range(8 * MAX_LINE_BYTES // 2**20):
            file.write(b"x" * 2**20)
        file.write(b"\n" + jsonl(["after"]))
    tracemalloc.start()
    texts, source = read(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts == ["before", "after"]
    assert source.tallies.rejected.origins == {"line too long": ["huge.jsonl:2"]}
    assert peak_bytes < 2 * MAX_LINE_BYTES


def test_a_gzip_bomb_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    squeezer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        for _ in range(100):
            file.write(squeezer.compress(bytes(2**20)))
        file.write(squeezer.flush())
    tracemalloc.start()
    (line,) = read_lines(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (line.content, line.num_bytes) == (None, 100 * 2**20)
    assert peak_bytes < 2 * MAX_LINE_BYTES


def test_members_of_a_gzip_and_frames_of_a_zstd_follow_each_other(tmp_path: Path) -> None:
    parts = [jsonl(["one", "two"]), jsonl(["three"])]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, parts)) + bytes(512))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert read(tmp_path / name)[0] == ["one", "two", "three"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
def test_cut_and_damaged_streams_stop_and_name_the_file(
    tmp_path: Path, suffix: str, kind: str
) -> None:
    compress = gzip.compress if suffix == ".gz" else zstandard.compress
    whole = compress(jsonl([f"text {n} {hash(str(n))}" for n in range(4000)]))
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{path.name} ends at byte {len(whole) // 2} .* after"):
        read(path)
    damaged = bytearray(whole)
    damaged[len(whole) // 3 : len(whole) // 3 + 40] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=rf"{path.name} is damaged"):
        read(path)


@pytest.mark.parametrize(
    ("name", "pack", "note"),
    [
        ("a.jsonl", gzip.compress, "gzip by its first bytes, not as its name says"),
        ("a.txt.gz", zstandard.compress, "zstd by its first bytes, not as its name says"),
        ("a.jsonl.gz", bytes, "not packed by its first bytes, not as its name says"),
        ("a.jsonl.zst", bytes, "not packed by its first bytes, not as its name says"),
        ("A.JSONL.GZ", gzip.compress, None),
        ("a.Txt.ZST", zstandard.compress, None),
    ],
)
def test_the_first_bytes_say_how_a_file_is_packed_and_another_name_is_a_note(
    tmp_path: Path, name: str, pack, note: str | None
) -> None:
    (tmp_path / name).write_bytes(pack(jsonl(["one", "two"])))
    texts, source = read(tmp_path / name)
    assert "one" in texts[0]
    assert not source.tallies.rejected.counts
    assert source.tallies.repaired.counts == ({note: 1} if note else {})


def test_a_file_that_is_named_gzip_and_is_no_text_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x00" + gzip.compress(jsonl(["one"]))[1:])
    with pytest.raises(DataError, match=r"a.jsonl.gz is damaged gzip data"):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (jsonl(["one"]).decode().encode("utf-16"), "UTF-16, not UTF-8"),
        (jsonl(["one"]).decode().encode("utf-16-be"), "UTF-16 (big-endian, without"),
        (jsonl(["one"]).decode().encode("utf-16-le"), "UTF-16 (little-endian, without"),
        (jsonl(["one"]).decode().encode("utf-32"), "UTF-32, not UTF-8"),
        (bz2.compress(jsonl(["one"])), "packed with bzip2"),
        (lzma.compress(jsonl(["one"])), "packed with xz"),
    ],
    ids=["utf-16", "utf-16-be", "utf-16-le", "utf-32", "bzip2", "xz"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_in_another_encoding_or_packing_is_a_whole_lost_file_that_names_it(
    tmp_path: Path, name: str, content, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(jsonl(["fine"]))
    texts, source = read(tmp_path)
    assert texts == ["fine"]
    (lost,) = source.tallies.account().files
    assert lost.is_whole
    assert lost.file == name
    assert next(iter(lost.reasons)).startswith(why)


@given(st.binary(max_size=300))
def test_whatever_bytes_a_text_file_holds_every_document_is_valid_utf8(
    tmp_path_factory: pytest.TempPathFactory, content
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_bytes(b"Text before. " * 9 + content)
    texts, _ = read(path)
    assert all("\0" not in text and text.encode() for text in texts)


def test_a_bad_byte_or_a_nul_drops_the_part_around_it_and_is_counted_with_its_place(
    tmp_path: Path,
) -> None:
    paragraph = b"A plain sentence about rain, and one more. " * 30 + b"\n\n"
    bad = paragraph[:70] + b"\xe9" + paragraph[71:]
    torn = paragraph[:50] + b"\0" + paragraph[51:]
    (tmp_path / "a.txt").write_bytes(paragraph * 40 + bad + paragraph * 40 + torn + paragraph * 40)
    (tmp_path / "b.txt").write_bytes(paragraph)
    texts, source = read(tmp_path)
    account = source.tallies.account()
    at = 40 * len(paragraph) + 70
    assert sum(text.count("\ufffd") for text in texts) == 1
    assert sum(map(len, texts)) == 122 * len(paragraph)
    (repaired,) = account.repaired.values()
    assert repaired.first == (f"a.txt:81 (byte {at})",)
    assert account.rejected["text holds a NUL"].first == ("a.txt:163",)
    assert account.lost_share == pytest.approx(1 / 122 / 2, rel=0.1)  # of two documents


def test_latin1_text_is_dropped_and_not_filled_with_replacements(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("l'été après la forêt, où il a plu\n".encode("latin-1") * 500)
    texts, source = read(tmp_path / "a.txt")
    assert not texts
    assert source.tallies.account().files[0].is_whole


def test_what_is_no_data_is_counted_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(jsonl(["one"]))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.parquet").touch()
    (tmp_path / ".hidden.jsonl").write_bytes(jsonl(["no"]))
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "old.jsonl.bz2").write_bytes(bz2.compress(jsonl(["two"])))
    texts, source = read(tmp_path)
    account = source.tallies.account()
    assert texts == ["one"]
    assert {reason: one.first for reason, one in account.passed_over.items()} == {
        "empty file": ("empty.jsonl:0", "empty.parquet:0"),
        "hidden": (".git:0", ".hidden.jsonl:0"),
        "neither a file nor a folder (FIFO, socket or device)": ("pipe.jsonl:0",),
    }
    assert [one.file for one in account.files] == ["old.jsonl.bz2"]
    with pytest.raises(DataError, match="neither a file nor a folder"):
        LocalSource(tmp_path / "pipe.jsonl", "text")


def test_lost_files_are_kept_by_name_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LOSSY_FILES", 3)
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_bytes(jsonl(["good"]) + b"bad\n" * number)
    account = read(tmp_path)[1].tallies.account()
    assert [(one.file, one.num_lost) for one in account.files[:2]] == [
        ("5.jsonl", 5),
        ("3.jsonl", 3),
    ]
    assert (account.num_lossy_files, account.num_lost, account.num_documents) == (5, 15, 6)


def test_nul_surrogates_and_wrong_types_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "a\\u0000b"}', b'{"text": "a\\ud800b"}', b'{"text": 7}', b"[1]", b""]
    path.write_bytes(b"\n".join([*lines, b'{"text": "fine"}']))
    texts, source = read(path)
    assert texts == ["a\ufffdb", "fine"]
    assert source.tallies.rejected.counts == {
        "text holds a NUL": 1,
        "`text` is not a text": 1,
        "not a JSON object": 1,
        "empty line": 1,
    }
    assert source.tallies.repaired.counts == {"lone surrogate replaced by U+FFFD": 1}


@given(st.text())
def test_a_taken_text_is_valid_utf8_with_newlines_only(text) -> None:
    tallies = Tallies()
    found = list(take_text(text, RecordOrigin("f", 1), tallies))
    assert len(found) + sum(tallies.rejected.counts.values()) == 1
    for document in found:
        assert document.text.encode()
        assert "\r" not in document.text
        assert "\0" not in document.text


def test_every_kind_of_line_end_becomes_one_newline() -> None:
    (document,) = take_text("a\r\nb\rc\nd\r\n\r\ne", RecordOrigin("f", 1), Tallies())
    assert document.text == "a\nb\nc\nd\n\ne"


def test_named_origins_are_bounded_and_the_count_is_not() -> None:
    tally = RejectTally()
    for number in range(1000):
        tally.add("bad", RecordOrigin("f", number))
    (found,) = tally.freeze().values()
    assert (found.count, len(found.origins)) == (1000, MAX_NAMED_ORIGINS)


@given(st.text(alphabet="ab é日\n", max_size=300), st.integers(16, 40))
def test_pieces_of_a_text_file_join_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, text, limit_bytes
) -> None:
    path = tmp_path_factory.mktemp("plain") / "a.txt"
    path.write_text(text)
    pieces = list(read_plain(path, "a.txt", limit_bytes, Tallies()))
    assert all(len(piece.text.encode()) <= limit_bytes for piece in pieces)
    whole = "".join(piece.text for piece in pieces)
    assert whole.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


def test_a_text_is_cut_at_a_paragraph_before_a_line_before_a_word() -> None:
    assert cut_position(b"aaaaaa\n\nb\nc dd d", 12) == 8
    assert cut_position(b"aaaaaaa\nc dddd", 12) == 8
    assert cut_position(b"aaaaaaaa c dddd", 12) == 11
    assert cut_position("日日日日日日".encode(), 10) == 9


def test_a_lone_small_file_is_cut_finer_than_one_of_many() -> None:
    assert piece_bytes(160_000, is_alone=True) == 10_000
    assert piece_bytes(160_000, is_alone=False) == piece_bytes(10**9, is_alone=True) == 2**18


def test_text_that_is_not_utf8_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    texts, source = read(tmp_path / "a.txt")
    assert not texts
    assert source.tallies.rejected.origins == {"not UTF-8": ["a.txt:1"]}


def write_parquet(path: Path, texts, **settings) -> None:
    table = pa.table({"text": texts, "id": list(range(len(texts)))})
    pq.write_table(table, path, write_page_checksum=True, compression="none", **settings)


def test_parquet_rows_load_and_nulls_are_counted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["one", None, "three"])
    texts, source = read(tmp_path / "a.parquet")
    assert texts == ["one", "three"]
    assert source.tallies.rejected.origins == {"`text` is null": ["a.parquet:2"]}
    with pytest.raises(DataError, match=r"column `id` of .* is int64, not text"):
        read(tmp_path / "a.parquet", "id")


def test_a_flipped_bit_in_a_parquet_page_is_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [f"unmistakable {n}" for n in range(100)], use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"unmistakable 42", b"unmistakable 43", 1))
    assert pq.read_table(path)["text"][42].as_py() == "unmistakable 43"  # silent by default
    with pytest.raises(DataError, match=r"a.parquet cannot be read after row 0: .*CRC"):
        read(path)


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_no_parquet_is_a_stop(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet cannot be read"):
        read(tmp_path / "a.parquet")


def test_a_folder_is_read_in_the_order_of_names_and_unknown_files_are_counted(
    tmp_path: Path,
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.jsonl").write_bytes(jsonl(["second"]))
    (tmp_path / "a.TXT").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("no")
    write_parquet(tmp_path / "c.parquet", ["third"])
    texts, source = read(tmp_path)
    assert texts == ["first", "second", "third"]
    assert source.tallies.rejected.origins == {"unknown kind of file": ["picture.png:0"]}
    assert [file.name for file in source.record(hash_file).files] == [
        "a.TXT",
        "b/2.jsonl",
        "c.parquet",
    ]


def test_links_to_folders_and_odd_names_are_not_lost_in_silence(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link").symlink_to(real)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("odd")
    texts, source = read(folder)
    assert texts == ["odd"]
    assert source.tallies.rejected.origins == {"link to a folder, not followed": ["link:0"]}
    assert source.record(hash_file).model_dump_json().count("caf\\\\xe9.txt") == 1


def test_a_file_that_vanishes_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        read(tmp_path)
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        LocalSource(tmp_path / ("x" * 300), "text")


def test_missing_and_unknown_paths_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        LocalSource(tmp_path / "nowhere", "text")
    with pytest.raises(DataError, match=r"holds 0 files.*\.jsonl"):
        LocalSource(tmp_path, "text")
    (tmp_path / "a.bin").write_bytes(b"?")
    with pytest.raises(DataError, match=r"is not a file of a known kind.*\.jsonl"):
        LocalSource(tmp_path / "a.bin", "text")


def test_a_resumed_local_source_counts_again_and_continues(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"bad\n" + jsonl(["one", "two", "three"]))
    source = LocalSource(tmp_path / "a.jsonl", "text")
    found = [d.text for d in source.documents(SourcePosition(num_documents=2))]
    assert found == ["three"]
    assert source.tallies.rejected.counts == {"malformed JSON": 1}


def test_the_python_library_is_real_text_without_tests() -> None:
    source = StdlibSource()
    names = {path.as_posix() for path in source.files()}
    assert "argparse.py" in names
    assert not any("/test/" in name or name.startswith("test/") for name in names)
    titles = [d.origin.file for d in source.documents(SourcePosition())]
    assert len(titles) > 300
    assert any(title.startswith("pydoc_data/topics.py[") for title in titles)


def test_a_python_without_its_library_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fineweb_edu_local"):
        StdlibSource(tmp_path).record(hash_file)


def test_synthetic_text_follows_its_seed_and_resumes() -> None:
    def take(seed: int, start: int):
        documents = SyntheticSource(seed).documents(SourcePosition(num_documents=start))
        return [document.text for _, document in zip(range(5), documents, strict=False)]

    assert take(1, 0) == take(1, 0) != take(2, 0)
    assert take(1, 3)[:2] == take(1, 0)[3:]


def test_reading_lines_keeps_numbers_over_chunk_borders(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        for number in range(20_000):
            file.write(b"%d\r\n" % number)
    lines = list(read_lines(path))
    assert [int(line.content) for line in lines] == list(range(20_000))
    assert lines[-1].number == 20_000
