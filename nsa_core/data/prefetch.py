"""Prefetcher: build items ahead in a thread, and hand each out before a deadline or fail."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from nsa_core.data.reporting import DataError

Item = TypeVar("Item")
#: How often a waiting caller gets to look at its signals.
POLL_S = 0.1
STALL_HINT = (
    "look at the disk and the data folder, then resume; data.loader_timeout_s sets the deadline"
)


class LoaderStalled(DataError):  # noqa: N818 - the name says a state; it is a DataError
    """No batch arrived before the deadline, or the loader's thread died."""


def do_nothing() -> None:
    """The poll of a caller that has nothing to look at."""


class Prefetcher(Generic[Item]):
    """Runs `build(0)`, `build(1)`, … in one daemon thread and returns the results in that order.

    `depth` items are kept ready; 0 builds each one when it is needed, under the same deadline.
    """

    def __init__(self, build: Callable[[int], Item], depth: int, timeout_s: float) -> None:
        self._build = build
        self._depth = depth
        self._timeout_s = timeout_s
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._built: queue.SimpleQueue[Item | Exception] = queue.SimpleQueue()
        self._ready: deque[Item] = deque()
        self._num_asked = 0
        self._num_received = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="data-loader", daemon=True)
        self._thread.start()
        self._ask(depth)

    def warm_up(self, count: int, poll: Callable[[], None] = do_nothing) -> None:
        """Wait until `count` items are built; they are handed out afterwards."""
        self._ask(max(count, self._depth) - len(self._ready))
        while len(self._ready) < count:
            self._ready.append(self._receive(poll))

    def next(self, poll: Callable[[], None] = do_nothing) -> Item:
        """The next item.

        `poll` is called about ten times a second while waiting; what it raises ends the wait, and
        no item is lost.

        Raises:
            LoaderStalled: If it is not built before the deadline, or the thread has died.
            DataError: If the data could not be read, or cannot be used.
            Exception: Whatever else building it raised, as if it were built here.
        """
        self._ask(max(1, self._depth) - len(self._ready))
        item = self._ready.popleft() if self._ready else self._receive(poll)
        self._ask(self._depth - len(self._ready))
        return item

    def close(self, wait_s: float = 5.0) -> bool:
        """End the thread; False if it is still blocked in a read (it dies with the process)."""
        self._is_closed.set()
        self._asked.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _ask(self, count: int) -> None:
        for _ in range(count - (self._num_asked - self._num_received)):
            self._asked.put(self._num_asked)
            self._num_asked += 1

    def _receive(self, poll: Callable[[], None]) -> Item:
        found = self._wait(poll)
        self._num_received += 1
        if isinstance(found, OSError | ValueError) and not isinstance(found, DataError):
            message = f"reading the staged data failed: {found}"
            raise DataError(message, "look at the disk, then resume") from found
        if isinstance(found, Exception):
            raise found
        return found

    def _wait(self, poll: Callable[[], None]) -> Item | Exception:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._built.get(timeout=min(POLL_S, self._timeout_s))
            except queue.Empty:
                poll()
                self._check(deadline_s)

    def _check(self, deadline_s: float) -> None:
        if not self._thread.is_alive() and self._built.empty():
            message = "the reading thread has died"
            raise LoaderStalled(message, "its traceback is in the log; resume when that is fixed")
        if time.monotonic() >= deadline_s:
            message = f"nothing was read for {self._timeout_s:g} s"
            raise LoaderStalled(message, STALL_HINT)

    def _work(self) -> None:
        for number in iter(self._asked.get, None):
            if self._is_closed.is_set():
                return
            try:
                self._built.put(self._build(number))
            except Exception as error:  # noqa: BLE001 - the caller raises it, in its own thread
                self._built.put(error)
