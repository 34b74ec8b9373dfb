"""Redaction: what looks like a secret in a person's words is replaced before it is kept or shown.

docs/redaction.md says what is recognised; what is not, nobody can tell from other words.
"""

import re
from typing import Annotated

from pydantic import AfterValidator

REDACTED = "[redacted]"

#: Keys whose beginning or shape says what they are.
_SHAPES = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bgh[opusr]_[A-Za-z0-9]{16,}",
    r"\bgithub_pat_\w{16,}",
    r"\bglpat-[\w-]{16,}",
    r"\bsk-[\w-]{16,}",
    r"\bxox[a-z]-[\w-]{10,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[\w-]{30,}",
    r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
)
_SHAPE = re.compile("|".join(_SHAPES), re.DOTALL)
#: `https://user:password@host`: the password alone.
_URL = re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]+(?=@)")
_HEADER = re.compile(r"(?i)(\bauthorization:\s*\w+\s+|\bbearer\s+(?=\S*\d))[\w.~+/=-]{8,}")
#: A name is looked for once a word, so a long text takes no more than its length.
_NAME = (
    r"(?P<name>[\w-]*(?i:pass(?:word|wd|phrase|code)|credentials?|secret|token"
    r"|(?:api|access|private|secret)[ _-]?key))"
)
_COUNT = re.compile(r"[\d.,_]{1,12}[;:)]?")
#: What was hidden before, or quoted pieces with what is joined to them, or a word.
_VALUE = r"""(?P<value>\[redacted\]|(?:(?:"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))[^\s"'.,;:)}\]]*)+|\S+)"""
_NAMED = re.compile(rf"""(?<![\w-]){_NAME}\b(?P<by>["']?\s*[=:]\s*|\s+is\s+){_VALUE}""")
_FLAG = re.compile(rf"(?<!\S)--?{_NAME}(?P<by>\s+)(?!-){_VALUE}")


def redact(text: str) -> str:
    """The text with each secret that is recognised as `[redacted]`; pure, and idempotent."""
    text = _SHAPE.sub(REDACTED, text)
    text = _URL.sub(rf"\1:{REDACTED}", text)
    text = _HEADER.sub(rf"\1{REDACTED}", text)
    return _NAMED.sub(_without_value, _FLAG.sub(_without_value, text))


def _without_value(found: re.Match[str]) -> str:
    """A name with its value gone, unless the value is more of the sentence or a count of tokens."""
    is_prose = found["by"].strip() == "is" and found["value"].rstrip(".,;:!?").isalpha()
    is_count = found["name"].lower().endswith("token") and _COUNT.fullmatch(found["value"])
    if is_prose or is_count:
        return found[0]
    return found[0].removesuffix(found["value"]) + REDACTED


#: A person's words in a record: redacted whenever the record is made or read.
FreeText = Annotated[str, AfterValidator(redact)]
