"""Time behind a protocol, so that waiting can be tested without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time, monotonic time and sleep."""

    def unix_s(self) -> float:
        """Seconds since 1970, for records."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that only moves forward, for deadlines."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The clock of this machine."""

    def unix_s(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def moment_of(unix_s: float, began_s: float, ended_s: float) -> float:
    """When another clock was read, on our own clock: the moment of the call that fits it best.

    Args:
        unix_s: What the other clock said.
        began_s: Our clock before the call that asked it.
        ended_s: Our clock after it.
    """
    return min(max(unix_s, began_s), max(began_s, ended_s))
