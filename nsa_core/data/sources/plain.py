"""Documents of a plain text file: the whole file, or pieces cut at paragraphs where it is long."""

from collections.abc import Iterator
from pathlib import Path

from nsa_core.data.documents import Document, Origin, Tallies, take_text
from nsa_core.data.lines import DamagedStream, damaged_file, read_chunks

#: A document of a text file is at most this long, so that memory stays bounded.
MAX_PIECE_BYTES = 256 * 2**10
MIN_PIECE_BYTES = 2**10
#: A lone file is cut into about this many documents, so that some can be held out for validation.
PIECES_OF_LONE_FILE = 16


def piece_bytes(num_bytes: int, *, is_alone: bool) -> int:
    """How long a document of a text file may be, given the file's size in bytes."""
    if not is_alone:
        return MAX_PIECE_BYTES
    return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, num_bytes // PIECES_OF_LONE_FILE))


def read_plain(path: Path, name: str, limit_bytes: int, tallies: Tallies) -> Iterator[Document]:
    """Yield the documents of a text file, plain, `.gz` or `.zst`; origins name the first line.

    A piece ends at the last blank line before `limit_bytes`, else at the last line end, space or
    character. Pieces that are not UTF-8 are counted and left out.

    Raises:
        DataError: If compressed data is damaged or ends early.
    """
    for first_line, content in _pieces(path, limit_bytes):
        origin = Origin(name, first_line)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            tallies.rejected.add("not UTF-8", origin)
            continue
        yield from take_text(text, origin, tallies)


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


def _pieces(path: Path, limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    held, line = b"", 1
    try:
        for chunk in read_chunks(path):
            held += chunk
            while len(held) > limit_bytes:
                cut = cut_position(held, limit_bytes)
                piece, held = held[:cut], held[cut:]
                yield line, piece
                line += piece.count(b"\n")
    except DamagedStream as error:
        last_line = line + held.count(b"\n")
        raise damaged_file(path, error, f"line {last_line}") from error
    if held:
        yield line, held
