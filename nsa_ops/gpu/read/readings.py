"""Single values as NVIDIA's tools print them: numbers, flags, sizes, addresses; unknown is None."""

import re

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:[x%]|[A-Za-z][A-Za-z/()]*)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B", re.IGNORECASE)
_IN_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_BUS = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?\b", re.IGNORECASE)
#: With or without its escape character, which some terminals and pasters eat.
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d+(?:;\d+)*m")
_UNKNOWN = frozenset({"", "n/a", "err!", "unknown", "not available", "not found", "gpu is lost"})
_UNKNOWN_STARTS = ("not supported", "unknown error", "requested functionality", "insufficient")
_FLAGS = {
    "yes": True, "enabled": True, "active": True, "on": True, "1": True,
    "no": False, "disabled": False, "not active": False, "off": False, "0": False,
}  # fmt: skip


def parse_number(cell: str) -> float | None:
    """A number with or without a unit; None for every spelling of unknown, such as [N/A]."""
    found = _NUMBER.fullmatch(cell.strip())
    return float(found[1]) if found else None


def parse_count(cell: str) -> int | None:
    """A whole number, else None."""
    number = parse_number(cell)
    return None if number is None else int(number)


def parse_mib(cell: str) -> int | None:
    """A size in MiB; a bare number is one already."""
    found = _SIZE.fullmatch(cell.strip())
    if found:
        return int(float(found[1]) * _IN_MIB[found[2].upper()])
    return parse_count(cell)


def parse_flag(cell: str) -> bool | None:
    """Yes or no in NVIDIA's many words, else None."""
    return _FLAGS.get(cell.strip().lower())


def parse_text(cell: str) -> str:
    """A name or version; empty for every spelling of unknown."""
    bare = cell.strip()
    return "" if is_unknown(bare) else bare


def is_unknown(cell: str) -> bool:
    """Whether a cell says that the tool cannot tell: N/A, [Not Supported], ERR!, nothing at all."""
    bare = cell.strip().strip("[]").strip().lower()
    return bare in _UNKNOWN or bare.startswith(_UNKNOWN_STARTS)


def parse_bus(text: str) -> str:
    """The first PCI address in a text as `domain:bus:device`, as the kernel writes it, or empty."""
    found = _BUS.search(text)
    if found is None:
        return ""
    domain, bus, device = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def strip_ansi(text: str) -> str:
    """Text without colour and underline sequences."""
    return _ANSI.sub("", text)
