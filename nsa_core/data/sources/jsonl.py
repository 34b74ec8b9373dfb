"""Documents of a JSON Lines file: strict JSON, one record a line, every bad line counted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from nsa_core.data.documents import Document, Origin, Tallies, take_text
from nsa_core.data.lines import Line, read_lines


class LineRejected(ValueError):  # noqa: N818 - a verdict on one line, not a failure of the program
    """Why a line gives no document; the text is the reason that is counted.

    Attributes:
        num_lost: Documents that are lost by it; none by an empty line.
        keys: Keys of a record without the text's key.
    """

    def __init__(self, reason: str, num_lost: float = 1.0, keys: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.num_lost = num_lost
        self.keys = keys


def read_jsonl(path: Path, name: str, text_key: str, tallies: Tallies) -> Iterator[Document]:
    """Yield the documents of a `.jsonl` file, plain, `.gz` or `.zst`.

    Args:
        path: The file.
        name: How the file is called in origins.
        text_key: Field that holds the text.
        tallies: Receives every line that gives no document, by reason.

    Raises:
        UnreadableFile: If it is text in another encoding than UTF-8, or packed in another way.
        DataError: If compressed data is damaged or ends early.
    """
    for line in read_lines(path):
        origin = Origin(name, line.number)
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


def _text_of(line: Line, text_key: str) -> str:
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
