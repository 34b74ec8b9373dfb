"""Lines of a plain, gzip or zstd file as bytes, in bounded memory, with the place of any damage."""

import codecs
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from nsa_core.data.reporting import DataError

#: Longer lines are not read into memory; they are passed over and reported with their number.
MAX_LINE_BYTES = 16 * 2**20
READ_BYTES = 64 * 2**10
#: A zstd block of 4 bytes can hold 128 KiB, so 1 KiB of input is at most 32 MiB of output.
ZSTD_READ_BYTES = 2**10
GZIP_WBITS = 16 + zlib.MAX_WBITS
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
MAGIC_BYTES = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *((bytes([first]) + b"\x2a\x4d\x18", "zstd") for first in range(0x50, 0x60)),
    *((b"BZh%d1AY&SY" % level, "bzip2") for level in range(1, 10)),  # three letters may be text
    (b"\xfd7zXZ\0", "xz"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
    (b"\x04\x22\x4d\x18", "lz4"),
)
#: UTF-32 before UTF-16, whose mark is the beginning of it.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
#: In UTF-16 text every other byte of a Latin letter is zero; UTF-8 text has hardly any.
SNIFFED_BYTES = 4096
MIN_SNIFFED_BYTES = 8
ZERO_SHARE = 0.6


@dataclass(frozen=True)
class TextLine:
    """One line without its line end; `content` is None where it is longer than the limit."""

    number: int
    content: bytes | None
    num_bytes: int


def read_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[TextLine]:
    """Yield the lines of a file, plain, gzip or zstd by its first bytes.

    Whole lines before a damaged place are yielded first.

    Raises:
        UnreadableFile: If it is text in another encoding than UTF-8, or packed in another way.
        DataError: If compressed data is damaged or ends early; names file, byte and line.
    """
    splitter = _LineSplitter(max_line_bytes)
    try:
        for chunk in read_text_chunks(path):
            yield from splitter.feed(chunk)
    except DamagedStream as error:
        raise damaged_file(path, error, f"{splitter.num_lines} whole lines") from error
    yield from splitter.finish()


def read_text_chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a text file in pieces.

    Raises:
        UnreadableFile: If it is text in another encoding than UTF-8, or packed in another way.
        DamagedStream: If compressed data is damaged or ends early.
    """
    is_known = False
    for chunk in _read_chunks(path):
        if chunk and not is_known:
            is_known = True
            encoding = name_encoding(chunk)
            if encoding is not None:
                message = f"{encoding}, not UTF-8"
                raise UnreadableFile(message)
        yield chunk


def _read_chunks(path: Path) -> Iterator[bytes]:
    packing = find_packing(path)
    if packing is not None and packing in PACKINGS.values():
        yield from _unpack(path, packing)
    elif packing is not None:
        message = f"packed with {packing}, which is not read here"
        raise UnreadableFile(message)
    else:
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                yield chunk


def find_packing(path: Path) -> str | None:
    """`gzip`, `zstd`, or the name of what is not read here; None for a file that is not packed.

    The first bytes decide. A name that says gzip or zstd is believed only where they are no text,
    so that a damaged file is found.
    """
    with path.open("rb") as file:
        head = file.read(READ_BYTES)
    for magic, packing in MAGIC_BYTES:
        if head.startswith(magic):
            return packing
    named = packing_by_name(path.name)
    return named if named is not None and _is_binary(head) else None


def packing_by_name(name: str) -> str | None:
    """`gzip` or `zstd` where the suffix says so, in any case."""
    return PACKINGS.get(Path(name).suffix.lower())


def _is_binary(head: bytes) -> bool:
    """Whether these first bytes of a file are no text in UTF-8; a cut character at the end is."""
    if b"\0" in head:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return False


def name_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, by the byte-order mark or the zeros of these first bytes; else None."""
    for mark, name in BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return name
    looked_at = head[:SNIFFED_BYTES]
    half = len(looked_at) // 2
    if half < MIN_SNIFFED_BYTES // 2:
        return None
    zeros_even, zeros_odd = looked_at[0::2].count(0) / half, looked_at[1::2].count(0) / half
    if zeros_odd > ZERO_SHARE and zeros_even < 1 - ZERO_SHARE:
        return "UTF-16 (little-endian, without a byte-order mark)"
    if zeros_even > ZERO_SHARE and zeros_odd < 1 - ZERO_SHARE:
        return "UTF-16 (big-endian, without a byte-order mark)"
    return None


class UnreadableFile(Exception):  # noqa: N818 - never leaves this package; becomes a count
    """A whole file that is not read; the text says why, as a reason that is counted."""


class DamagedStream(Exception):  # noqa: N818 - never leaves this package; becomes a DataError
    """Compressed data that is damaged or ends early; the text says where."""


def damaged_file(path: Path, error: DamagedStream, whole: str) -> DataError:
    """The clear stop at a damaged place: file, byte, and how much before it is whole."""
    message = f"{path} {error}, after {whole}"
    return DataError(message, "fetch the file again, or repair or remove it")


class _LineSplitter:
    """Cuts a stream of chunks at newlines, holding at most one line of the allowed length."""

    def __init__(self, max_line_bytes: int) -> None:
        self.num_lines = 0
        self._max = max_line_bytes
        self._held: list[bytes] = []
        self._num_bytes = 0
        self._at_start = True

    def feed(self, chunk: bytes) -> Iterator[TextLine]:
        if self._at_start and chunk:
            chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._hold(piece)
            yield self._close()
        self._hold(rest)

    def finish(self) -> Iterator[TextLine]:
        if self._num_bytes:
            yield self._close()

    def _hold(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max:
            self._held.clear()
        elif piece:
            self._held.append(piece)

    def _close(self) -> TextLine:
        self.num_lines += 1
        fits = self._num_bytes <= self._max
        content = b"".join(self._held).removesuffix(b"\r") if fits else None
        line = TextLine(self.num_lines, content, self._num_bytes)
        self._held.clear()
        self._num_bytes = 0
        return line


def _unpack(path: Path, packing: str) -> Iterator[bytes]:
    """Decompress gzip or zstd data, which may be several streams one after another."""
    is_gzip = packing == "gzip"
    stream, is_fresh, position = _new_stream(is_gzip=is_gzip), True, 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES if is_gzip else ZSTD_READ_BYTES):
            position += len(block)
            while block:
                try:
                    yield stream.decompress(block, *([4 * READ_BYTES] if is_gzip else []))
                except (zlib.error, zstandard.ZstdError) as error:
                    message = f"is damaged {packing} data before byte {position} ({error})"
                    raise DamagedStream(message) from error
                is_fresh, block = False, stream.unconsumed_tail
                if stream.eof:
                    block = stream.unused_data.lstrip(b"\0" if is_gzip else b"")
                    stream, is_fresh = _new_stream(is_gzip=is_gzip), True
    if not is_fresh:
        yield stream.flush()
        message = f"ends at byte {position} in the middle of its {packing} data"
        raise DamagedStream(message)


def _new_stream(*, is_gzip: bool) -> Any:
    """Both have `decompress`, `eof`, `unused_data`, `unconsumed_tail` and `flush`."""
    if is_gzip:
        return zlib.decompressobj(GZIP_WBITS)
    return zstandard.ZstdDecompressor().decompressobj()
