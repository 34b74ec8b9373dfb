"""Read JSON that somebody else wrote: bounded in bytes, depth and number of values."""

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound=BaseModel)
# A string without its end reaches to the end of the content, so that each byte is seen once.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
#: Random states have integers of 39 digits.
_MAX_DIGITS = 100


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
            parse_int=_parse_int,
            parse_float=parse_float,
            parse_constant=parse_float,
            object_pairs_hook=_refuse_duplicates,
        )
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        message = f"it is not JSON: {error}"
        raise JsonError(message) from error


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        message = f"a number has {len(text)} digits, and the limit is {_MAX_DIGITS}"
        raise JsonError(message)
    return int(text)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_others = Counter(name for name, _ in pairs).most_common(1)
        message = f"the key {twice[:80]!a} stands in it twice"
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
