"""Bars, in signs that the encoding of a terminal has."""


def can_show(signs: str, encoding: str) -> bool:
    """Whether an encoding has all of these signs."""
    try:
        signs.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def share_of(done: float, total: float) -> float:
    """Part of a total, 0 to 1; a pod may say numbers that no division stands."""
    return min(max(done, 0), total) / total if total > 0 else 0.0


def bar(share: float, encoding: str, width: int = 30) -> str:
    """A share of 0 to 1 as a bar, in signs that the encoding has."""
    full, empty = ("█", "░") if can_show("█░", encoding) else ("#", "-")
    num_full = round(min(1.0, max(0.0, share)) * width)
    return full * num_full + empty * (width - num_full)
