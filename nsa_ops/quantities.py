"""Numbers and sentences as people read them: times, durations, sizes in base 2, counts, cases."""

import math
import re
from datetime import UTC, datetime

#: Names that keep their case at the beginning of a sentence.
_NAMES = frozenset({"git", "nvidia-smi", "rsync", "ssh", "sshd", "tmux", "torch"})
_WORD = re.compile(r"([a-z]+(?:-[a-z]+)?)(?:'s)?[,:;]?")
_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86_400


def format_time(unix_s: float) -> str:
    """`2026-11-27 14:03:00 UTC`: to the second."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # no number, or a year that no calendar has
        return "unknown"


def format_duration(seconds: float) -> str:
    """`8 ms`, `0.8 s`, `42 s`, `3 min 5 s`, `2 h 10 min`, `1 d 4 h`: the two largest parts."""
    if not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return _two_parts(whole, _MINUTE_S, "min", 1, "s")
    if whole < _DAY_S:
        return _two_parts(whole, _HOUR_S, "h", _MINUTE_S, "min")
    return _two_parts(whole, _DAY_S, "d", _HOUR_S, "h")


def _two_parts(whole_s: int, large_s: int, large: str, small_s: int, small: str) -> str:
    rest = whole_s % large_s // small_s
    return f"{whole_s // large_s} {large}" + (f" {rest} {small}" if rest else "")


def format_seconds(seconds: float) -> str:
    """`83.1 ms`, `830 ms`, `1.21 s`, `12.3 s`: three digits, to compare times that are alike."""
    milliseconds = 1000 * seconds
    if milliseconds < 99.5:
        return f"{milliseconds:.3g} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else format_duration(seconds)


def format_bytes(count: float | None) -> str:
    """`812 B`, `4.8 MiB`, `31 GiB`: base 2, as disks and cards are reported here; or `unknown`."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_count(value: float) -> str:
    """`950`, `12.5k`, `1.05M`, `3.2B`: at most three digits that carry meaning."""
    size = abs(value)
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return format_number(value)


#: `str.isdigit` also takes a raised 2, which `int` refuses, and no float holds 400 digits.
_COUNT = re.compile(r"[0-9]{1,18}")


def parse_count(text: str) -> int | None:
    """A whole number of at most 18 ASCII digits, as machines print one; None for anything else."""
    return int(text) if _COUNT.fullmatch(text) else None


def count_of(number: int, noun: str, plural: str = "") -> str:
    """`1 step`, `2 steps`, `12,000 entries`: a number and its noun in the form that fits it.

    Args:
        number: How many.
        noun: One of them.
        plural: Several of them, where that is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_number(value: float) -> str:
    """Four significant digits, without an exponent where a person would not write one."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def shorten_middle(text: str, width: int) -> str:
    """Text of at most so many characters: its beginning and its end, with `…` between them."""
    if len(text) <= width:
        return text
    num_last = (width - 1) // 2
    return f"{text[: width - 1 - num_last]}…{text[len(text) - num_last :]}"


def sentence_case(text: str, *names: str) -> str:
    """Text with a capital letter in front; a program, login or setting there keeps its case.

    Args:
        text: What is said.
        names: What people have named, such as a host or a run; one in front keeps its case.
    """
    if any(text.startswith(name) for name in names if name):
        return text
    first, space, rest = text.partition(" ")
    word = _WORD.fullmatch(first)
    if word and word[1] not in _NAMES:
        return f"{first[0].upper()}{first[1:]}{space}{rest}"
    return text
