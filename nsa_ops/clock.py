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
