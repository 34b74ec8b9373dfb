"""Read JSON and JSON lines that somebody else wrote: bounded in bytes, depth and number of values.

Lines are read by byte offset: nothing is lost or repeated, and torn lines are counted.
"""

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound=BaseModel)
# A string without its end reaches to the end of the content, so that each byte is seen once.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
#: Random states have integers of 39 digits; no float holds more than 309.
_MAX_DIGITS = 100
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (_MAX_DIGITS + 1))
_STRING_OR_LONG_NUMBER = re.compile(
    rb'"(?:[^"\\]|\\.)*+"?|' + _LONG_NUMBER.pattern + rb"[0-9]*+", re.DOTALL
)


class JsonError(ValueError):
    """The content is not JSON within the limits; the message says why."""


@dataclass(frozen=True)
class JsonLimits:
    """Ceilings of one document.

    Attributes:
        max_bytes: Bytes of the document.
        max_depth: Objects and lists inside each other.
        max_values: Keys and values, estimated from above.
    """

    max_bytes: int = 16 * 2**20
    max_depth: int = 64
    max_values: int = 1_000_000


#: An answer of an agent, a report, a document of a run.
DOCUMENT = JsonLimits()
#: A manifest of a run or of a checkpoint, and the record of a backup.
MANIFEST = JsonLimits(max_bytes=4 * 2**20, max_values=200_000)
#: One line of heartbeats or events.
LINE = JsonLimits(max_bytes=2**20, max_depth=32, max_values=20_000)


def check_limits(content: bytes, limits: JsonLimits = DOCUMENT) -> None:
    """Raise JsonError if a document is over a limit; it is looked at and not parsed."""
    if len(content) > limits.max_bytes:
        message = f"it has {len(content)} bytes, and the limit is {limits.max_bytes}"
        raise JsonError(message)
    opened = content.count(b"{") + content.count(b"[")
    num_values = content.count(b",") + content.count(b":") + opened
    if num_values > limits.max_values:
        message = f"it has up to {num_values} values, and the limit is {limits.max_values}"
        raise JsonError(message)
    if opened > limits.max_depth and _depth(content) > limits.max_depth:
        message = f"it is nested deeper than the limit of {limits.max_depth}"
        raise JsonError(message)
    if _LONG_NUMBER.search(content):
        _check_numbers(content)


def _check_numbers(content: bytes) -> None:
    """Raise JsonError if a number outside of all strings is too long."""
    for token in _STRING_OR_LONG_NUMBER.finditer(content):
        num_digits = token.end() - token.start()
        if content[token.start()] != ord('"'):
            message = f"a number has {num_digits} digits, and the limit is {_MAX_DIGITS}"
            raise JsonError(message)


def _depth(content: bytes) -> int:
    depth = deepest = 0
    for token in _TOKEN.finditer(content):
        first = content[token.start()]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest


def parse_json(
    content: bytes, limits: JsonLimits = DOCUMENT, *, is_nan_allowed: bool = False
) -> Any:
    """The value of a document, in Python's own types.

    Args:
        content: UTF-8.
        limits: Ceilings.
        is_nan_allowed: Take `NaN` and infinities, which Python's own writer produces.

    Raises:
        JsonError: If it is no JSON, over a limit, or has a key twice.
    """
    check_limits(content, limits)

    def parse_float(text: str) -> float:
        number = float(text)
        if not math.isfinite(number) and not is_nan_allowed:
            message = f"the number {text[:_MAX_DIGITS]} is not finite"
            raise JsonError(message)
        return number

    try:
        return json.loads(
            content.decode("utf-8"),
            parse_float=parse_float,
            parse_constant=parse_float,
            object_pairs_hook=_refuse_duplicates,
        )
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        message = f"it is not JSON: {error}"
        raise JsonError(message) from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_others = Counter(name for name, _ in pairs).most_common(1)
        message = f"it has the key {twice[:80]!a} twice"
        raise JsonError(message)
    return found


def parse_model(kind: type[ModelT], content: bytes, limits: JsonLimits = DOCUMENT) -> ModelT:
    """A record from a document.

    Raises:
        ValueError: If it is over a limit (JsonError), or is no such record (ValidationError).
    """
    check_limits(content, limits)
    return kind.model_validate_json(content)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; nothing else is waited for.

    Raises:
        JsonError: If it is no regular file.
        OSError: If it cannot be opened.
    """
    # A FIFO would wait for its writer without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    message = "it is no regular file"
    raise JsonError(message)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Bytes of a regular file; nothing else is waited for.

    Raises:
        JsonError: If it is longer than the limit, or no regular file.
        OSError: If it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > max_bytes:
        message = f"it has {size} bytes, and the limit is {max_bytes}"
        raise JsonError(message)
    return content


def read_json(path: Path, limits: JsonLimits = DOCUMENT, *, is_nan_allowed: bool = False) -> Any:
    """The value of a JSON file; errors as of `parse_json` and `read_bounded`."""
    content = read_bounded(path, limits.max_bytes)
    return parse_json(content, limits, is_nan_allowed=is_nan_allowed)


def read_model(kind: type[ModelT], path: Path, limits: JsonLimits = DOCUMENT) -> ModelT:
    """A record from a JSON file; errors as of `parse_model` and `read_bounded`."""
    return parse_model(kind, read_bounded(path, limits.max_bytes), limits)


RecordT = TypeVar("RecordT", bound=BaseModel)
#: The newest part of a file that is read as a whole: 200,000 heartbeats of 300 bytes.
MAX_HISTORY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class JsonLines(Generic[RecordT]):
    """What was read between two offsets.

    Attributes:
        records: Whole records, oldest first.
        offset: Where the next read begins: the end of the last whole line.
        torn: Whole lines that do not parse, cut off by a kill or a full disk.
        begin: Where the first line that was read begins.
        problem: Why the file could not be read, in one line; empty if it could, or is not there.
    """

    records: list[RecordT]
    offset: int
    torn: int
    begin: int = 0
    problem: str = ""


def parse_records(content: bytes, kind: type[RecordT], offset: int = 0) -> JsonLines[RecordT]:
    """Parse JSON lines; a last line without its newline is left for the next read."""
    whole, newline, _ = content.rpartition(b"\n")
    records: list[RecordT] = []
    torn = 0
    for line in whole.split(b"\n") if newline else []:
        if not line.strip():
            continue
        try:
            records.append(parse_model(kind, line, LINE))
        except ValueError:  # no such record, or over a limit
            torn += 1
    return JsonLines(records, offset + len(whole) + len(newline), torn, offset)


def _problem(path: Path, error: OSError | JsonError) -> str:
    why = error.strerror if isinstance(error, OSError) else error
    return f"{path.name} cannot be read: {why}"


def read_records(
    path: Path, kind: type[RecordT], offset: int = 0, max_bytes: int = -1
) -> JsonLines[RecordT]:
    """Read the records of a file from a byte offset on; a file that is not there has none.

    One that cannot be read has none either, and `problem` says why.

    Args:
        path: JSON lines.
        kind: Type of a line.
        offset: First byte to read: 0, or the offset of an earlier read.
        max_bytes: Read no more than this at a time; -1 reads to the end. A line that is longer
            than this is skipped in pieces, each counted as torn.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            content = file.read(max_bytes)
    except FileNotFoundError:
        return JsonLines([], offset, 0)
    except (OSError, JsonError) as error:
        return JsonLines([], offset, 0, problem=_problem(path, error))
    if len(content) == max_bytes and b"\n" not in content:
        return JsonLines([], offset + max_bytes, 1)
    return parse_records(content, kind, offset)


def read_last_records(
    path: Path, kind: type[RecordT], max_bytes: int = 65536
) -> JsonLines[RecordT]:
    """Read the records in the last bytes of a file; a line that the window cuts is skipped.

    A file that cannot be read has none, and `problem` says why.
    """
    try:
        content, start = _read_end(path, max_bytes)
    except (OSError, JsonError) as error:
        return JsonLines([], 0, 0, problem=_problem(path, error))
    return parse_records(content, kind, start)


def find_last_records(
    path: Path, kind: type[RecordT], words: Sequence[str], max_bytes: int = MAX_HISTORY_BYTES
) -> list[RecordT]:
    """Read only those of a file's last lines that hold one of these words, oldest first.

    Parsing is what costs: of 440,000 events, all that fit, it took 5 s, and this took 0.3 s. A word
    may stand in any field, so the caller still checks the records. A file that cannot be read has
    none.
    """
    try:
        content, _ = _read_end(path, max_bytes)
    except (OSError, JsonError):
        return []
    pattern = re.compile(b"|".join(re.escape(word.encode()) for word in words))
    lines: list[bytes] = []
    found = pattern.search(content)
    while found is not None:
        begin, end = content.rfind(b"\n", 0, found.start()) + 1, content.find(b"\n", found.end())
        if end < 0:  # a last line without its newline is not whole yet
            break
        lines.append(content[begin : end + 1])
        found = pattern.search(content, end)
    return parse_records(b"".join(lines), kind).records


def _read_end(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """The last bytes of a file, from the beginning of a line on, and where that is."""
    try:
        with open_regular(path) as file:
            end = file.seek(0, 2)
            start = max(0, end - max_bytes)
            file.seek(start)
            content = file.read(max_bytes)
    except FileNotFoundError:
        return b"", 0
    if start:
        head, _, content = content.partition(b"\n")
        start += len(head) + 1
    return content, start
