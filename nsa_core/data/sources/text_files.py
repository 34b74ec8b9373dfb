"""Documents of JSON Lines and of plain text files; what gives no document is counted by reason."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from nsa_core.data.documents import Document, RecordOrigin, Tallies, take_text
from nsa_core.data.lines import DamagedStream, TextLine, damaged_file, read_lines, read_text_chunks

#: A document of a text file is at most this long, so that memory stays bounded.
MAX_PIECE_BYTES = 256 * 2**10
MIN_PIECE_BYTES = 2**10
#: A lone file is cut into about this many documents, so that some can be held out for validation.
PIECES_OF_LONE_FILE = 16
#: A place that is no text costs at most this much around it.
MAX_PART_BYTES = 4 * 2**10
#: Text in an old encoding of one byte a character has more bad bytes than this, save for English.
MAX_BAD_SHARE = 0.01
PARAGRAPH = re.compile(rb".*?\n\n+|.+", re.DOTALL)


class LineRejected(ValueError):  # noqa: N818 - a verdict on one line, not a failure of the program
    """Why a line gives no document; the text is the reason that is counted."""

    def __init__(self, reason: str, num_lost: float = 1.0, keys: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.num_lost = num_lost
        self.keys = keys


def read_jsonl(path: Path, name: str, text_key: str, tallies: Tallies) -> Iterator[Document]:
    """Yield the documents of a `.jsonl` file, plain, `.gz` or `.zst`.

    Raises:
        UnreadableFile: If it is text in another encoding than UTF-8, or packed in another way.
        DataError: If compressed data is damaged or ends early.
    """
    for line in read_lines(path):
        origin = RecordOrigin(name, line.number)
        try:
            text = _text_of(line, text_key)
        except LineRejected as rejected:
            tallies.reject(str(rejected), origin, rejected.num_lost)
            tallies.note_keys(rejected.keys, origin)
            continue
        yield from take_text(text, origin, tallies)


def parse_json(content: bytes) -> object:
    """The value of one strict JSON text in UTF-8 (RFC 8259: no NaN, no Infinity).

    Raises:
        LineRejected: If it is not UTF-8, not JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        message = "not UTF-8"
        raise LineRejected(message) from error
    except RecursionError as error:
        message = "nested too deeply"
        raise LineRejected(message) from error
    except LineRejected:
        raise
    except ValueError as error:
        message = "malformed JSON"
        raise LineRejected(message) from error


def _refuse_constant(name: str) -> NoReturn:
    del name
    message = "malformed JSON"
    raise LineRejected(message)


def _text_of(line: TextLine, text_key: str) -> str:
    if line.content is None:
        message = "line too long"
        raise LineRejected(message)
    if not line.content.strip():
        message = "empty line"
        raise LineRejected(message, num_lost=0)
    record = parse_json(line.content)
    if not isinstance(record, dict):
        message = "not a JSON object"
        raise LineRejected(message)
    if text_key not in record:
        message = f"no key `{text_key}`"
        raise LineRejected(message, keys=tuple(record))
    text = record[text_key]
    if text is None:
        message = f"`{text_key}` is null"
        raise LineRejected(message)
    if not isinstance(text, str):
        message = f"`{text_key}` is not a text"
        raise LineRejected(message)
    return text


def piece_bytes(num_bytes: int, *, is_alone: bool) -> int:
    """How long a document of a text file may be, given the file's size in bytes."""
    if not is_alone:
        return MAX_PIECE_BYTES
    return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, num_bytes // PIECES_OF_LONE_FILE))


def read_plain(path: Path, name: str, limit_bytes: int, tallies: Tallies) -> Iterator[Document]:
    """Yield the documents of a text file, plain, gzip or zstd; origins name the first line.

    A piece ends at the last blank line before `limit_bytes`, else at the last line end, space or
    character. A bad byte costs a character or the part around it, as `clean_piece` says.

    Raises:
        UnreadableFile: If it is text in another encoding than UTF-8, or packed in another way.
        DataError: If compressed data is damaged or ends early.
    """
    for place, content in _pieces(path, limit_bytes):
        text = _strict_text(content)
        if text is None:
            text = clean_piece(content, name, place, tallies)
            if not text:
                continue
        yield from take_text(text, RecordOrigin(name, place.line), tallies, num_lost_if_empty=0.0)


def _strict_text(content: bytes) -> str | None:
    """The text, or None where a byte of it is none."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


@dataclass(frozen=True)
class PieceStart:
    """Where a piece begins: its line, counted from 1, and its byte, counted from 0."""

    line: int
    byte: int


def clean_piece(content: bytes, name: str, place: PieceStart, tallies: Tallies) -> str:
    """The text of a piece that holds bytes which are no text; empty if nothing of it is left.

    A part, which is a paragraph or at most `MAX_PART_BYTES` of a longer one, is dropped where it
    holds a NUL or more than `MAX_BAD_SHARE` of it is not UTF-8: it is no text, or text in another
    encoding. Elsewhere each bad byte becomes U+FFFD. Both are counted with line and byte.
    """
    kept: list[str] = []
    line, byte = place.line, place.byte
    for part in _parts(content):
        text, num_bad, first_bad = _decode(part)
        origin = RecordOrigin(name, line + part.count(b"\n", 0, first_bad))
        if "\0" in text:
            tallies.reject("text holds a NUL", origin, len(part) / len(content))
        elif num_bad > MAX_BAD_SHARE * len(part):
            tallies.reject("not UTF-8", origin, len(part) / len(content))
        else:
            kept.append(text)
            if num_bad:
                where = ByteOrigin(name, origin.line, byte + first_bad)
                tallies.repaired.add("byte that is not UTF-8 replaced by U+FFFD", where, num_bad)
        line += part.count(b"\n")
        byte += len(part)
    return "".join(kept)


@dataclass(frozen=True)
class ByteOrigin(RecordOrigin):
    """A place in a file by line and by byte, counted from 0."""

    byte: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} (byte {self.byte})"


def _decode(part: bytes) -> tuple[str, int, int]:
    """The text with U+FFFD for what is not UTF-8, the number of bad bytes, and where the first is.

    A NUL counts as the first bad place, too, and not as a bad byte.
    """
    first_nul = part.find(b"\0")
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError as error:
        first_bad = error.start if first_nul < 0 else min(error.start, first_nul)
        text = part.decode("utf-8", errors="replace")
        num_bad = text.count("\ufffd") - part.count("\ufffd".encode())
        return text, num_bad, first_bad
    return text, 0, max(0, first_nul)


def _parts(content: bytes) -> Iterator[bytes]:
    """A piece cut after each blank line, and longer parts at lines, words or characters."""
    for paragraph in PARAGRAPH.findall(content):
        rest = paragraph
        while len(rest) > MAX_PART_BYTES:
            cut = cut_position(rest, MAX_PART_BYTES)
            yield rest[:cut]
            rest = rest[cut:]
        yield rest


def cut_position(content: bytes, limit_bytes: int) -> int:
    """Where to cut so that at most `limit_bytes` stay: paragraph, line, word, or character."""
    for border in (b"\n\n", b"\n", b" "):
        found = content.rfind(border, limit_bytes // 2, limit_bytes)
        if found >= 0:
            return found + len(border)
    position = limit_bytes
    while position > limit_bytes - 4 and content[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _pieces(path: Path, limit_bytes: int) -> Iterator[tuple[PieceStart, bytes]]:
    held, line, byte = b"", 1, 0
    try:
        for chunk in read_text_chunks(path):
            held += chunk
            while len(held) > limit_bytes:
                cut = cut_position(held, limit_bytes)
                piece, held = held[:cut], held[cut:]
                yield PieceStart(line, byte), piece
                line += piece.count(b"\n")
                byte += len(piece)
    except DamagedStream as error:
        last_line = line + held.count(b"\n")
        raise damaged_file(path, error, f"line {last_line}") from error
    if held:
        yield PieceStart(line, byte), held
