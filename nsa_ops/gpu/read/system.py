"""Which system a machine runs, from what its tools print: Linux, Linux inside WSL, Windows."""

import re
from collections.abc import Sequence
from typing import Literal

from nsa_ops.gpu.card import GPU

#: Empty where nothing tells, as on plain Linux.
System = Literal["", "wsl", "windows", "macos"]
_MAX_LINE = 1000
_I = re.IGNORECASE
_WORDS: Sequence[tuple[System, re.Pattern[str]]] = (
    ("wsl", re.compile(r"microsoft-standard|-WSL2\b|/usr/lib/wsl/|\bdxgk(?:rnl|io)", _I)),
    (
        "windows",
        re.compile(
            r"Microsoft Windows \[Version|^(?:PS )?[A-Z]:\\[^>]*>"
            r"|is not recognized as (?:an internal or external command|(?:the|a) name of a cmdlet)",
            _I,
        ),
    ),
    ("macos", re.compile(r"\bDarwin Kernel Version|^Darwin \d+\.\d|^Darwin \S+ \d+\.\d")),
)


def parse_system(text: str) -> System:
    """What a text says of the system, by its first line that does; WSL before the Windows below."""
    lines = [line[:_MAX_LINE].strip() for line in text.splitlines()]
    return next(
        (system for system, words in _WORDS for line in lines if words.search(line)),
        "",
    )


def system_of(card: GPU) -> System:
    """What a card's driver says of the system that the tool ran on.

    Windows' driver has a model, and no persistence mode. Inside WSL it is asked through a library
    of another version, which says that persistence is on.
    """
    is_other = bool(card.tool_version) and card.tool_version != card.driver_version
    if is_other and card.driver_version.count(".") == 1:
        return "wsl"
    if card.driver_model:
        return "wsl" if card.is_persistent else "windows"
    return ""
