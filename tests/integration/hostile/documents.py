"""JSON that is not what its reader expects, and what is wrong with each."""

from dataclasses import dataclass

_DEEP = 100_000


@dataclass(frozen=True)
class Document:
    """Bytes in the place of a JSON object."""

    id: str
    content: bytes
    why: str


DOCUMENTS = (
    Document("deep-list", b"[" * _DEEP, "nested deeper than any stack"),
    Document(
        "deep-closed", b"[" * _DEEP + b"]" * _DEEP, "nested deeper than any stack, and closed"
    ),
    Document("deep-object", b'{"a":' * _DEEP + b"1" + b"}" * _DEEP, "objects, nested as deep"),
    Document("list", b"[1, 2]", "a list in the place of an object"),
    Document("string", b'"hello"', "a string in the place of an object"),
    Document("null", b"null", "nothing in the place of an object"),
    Document("empty", b"", "no bytes"),
    Document("cut", b'{"run_id": "x', "it ends in the middle"),
    Document("nan", b'{"schema_version": NaN}', "NaN is no JSON"),
    Document("digits", b'{"schema_version": ' + b"9" * 20_000 + b"}", "a number of 20,000 digits"),
    Document("exponent", b'{"step": 1e999999999}', "a number that is infinite"),
    Document("not-utf8", b'{"run_id": "\xff\xfe"}', "the bytes are no text"),
    Document("utf-16", '{"run_id": "x"}'.encode("utf-16"), "another encoding"),
    Document("nul", b"\0" * 4096, "a file of NUL bytes, as a cut disk leaves it"),
    Document("surrogate", b'{"run_id": "\\ud800", "step": 1}', "half a character"),
    Document("spaces", b" " * (24 * 2**20), "24 MB of blanks"),
    Document("wide", b"[" + b"0," * (6 * 2**20) + b"0]", "six million numbers"),
    Document("escape", b'{"run_id": "\\u001b[2J\\u0007"}', "a name that drives the terminal"),
)
