"""Lines of a plain, gzip or zstd file as bytes, in bounded memory, with the place of any damage."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zstandard

from nsa_core.data.errors import DataError

#: Longer lines are not read into memory; they are passed over and reported with their number.
MAX_LINE_BYTES = 16 * 2**20
READ_BYTES = 64 * 2**10
#: A zstd block of 4 bytes can hold 128 KiB, so 1 KiB of input is at most 32 MiB of output.
ZSTD_READ_BYTES = 2**10
GZIP_WBITS = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Line:
    """One line without its line end; `content` is None where it is longer than the limit."""

    number: int
    content: bytes | None
    num_bytes: int


def read_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines of a file; the suffix `.gz` or `.zst` says how it is compressed.

    Whole lines before a damaged place are yielded first.

    Raises:
        DataError: If compressed data is damaged or ends early; names file, byte and line.
        OSError: If the file cannot be read.
    """
    splitter = _LineSplitter(max_line_bytes)
    try:
        for chunk in read_chunks(path):
            yield from splitter.feed(chunk)
    except DamagedStream as error:
        raise damaged_file(path, error, f"{splitter.num_lines} whole lines") from error
    yield from splitter.finish()


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in pieces.

    Raises:
        DamagedStream: If compressed data is damaged or ends early.
    """
    if path.suffix == ".gz":
        yield from _inflate(path)
    elif path.suffix == ".zst":
        yield from _decompress_zstd(path)
    else:
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                yield chunk


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

    def feed(self, chunk: bytes) -> Iterator[Line]:
        if self._at_start and chunk:
            chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._hold(piece)
            yield self._close()
        self._hold(rest)

    def finish(self) -> Iterator[Line]:
        if self._num_bytes:
            yield self._close()

    def _hold(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max:
            self._held.clear()
        elif piece:
            self._held.append(piece)

    def _close(self) -> Line:
        self.num_lines += 1
        fits = self._num_bytes <= self._max
        content = b"".join(self._held).removesuffix(b"\r") if fits else None
        line = Line(self.num_lines, content, self._num_bytes)
        self._held.clear()
        self._num_bytes = 0
        return line


def _inflate(path: Path) -> Iterator[bytes]:
    inflater = zlib.decompressobj(GZIP_WBITS)
    position, is_fresh = 0, True
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            position += len(block)
            while block:
                try:
                    yield inflater.decompress(block, READ_BYTES * 4)
                except zlib.error as error:
                    message = f"is damaged gzip data before byte {position} ({error})"
                    raise DamagedStream(message) from error
                is_fresh = False
                block = inflater.unconsumed_tail
                if inflater.eof:
                    block = inflater.unused_data.lstrip(b"\0")
                    inflater, is_fresh = zlib.decompressobj(GZIP_WBITS), True
    if not is_fresh:
        yield inflater.flush()
        message = f"ends at byte {position} in the middle of its gzip data"
        raise DamagedStream(message)


class _ZstdFrame(Protocol):
    """What is used of zstandard's decompression object."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes) -> bytes: ...


def _new_zstd_frame() -> _ZstdFrame:
    frame: _ZstdFrame = zstandard.ZstdDecompressor().decompressobj()
    return frame


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    frame, is_fresh, position = _new_zstd_frame(), True, 0
    with path.open("rb") as file:
        while block := file.read(ZSTD_READ_BYTES):
            position += len(block)
            while block:
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    message = f"is damaged zstd data before byte {position} ({error})"
                    raise DamagedStream(message) from error
                is_fresh = False
                block = b""
                if frame.eof:
                    block = frame.unused_data
                    frame, is_fresh = _new_zstd_frame(), True
    if not is_fresh:
        message = f"ends at byte {position} in the middle of its zstd data"
        raise DamagedStream(message)
