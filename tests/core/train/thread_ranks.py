"""Two ranks in two threads of one process, with collectives that give the other one up."""

import threading
from collections.abc import Callable

from nsa_core.env import RankEnvironment
from nsa_core.train.group import RankGroup


class ThreadRank(RankGroup):
    """One of two ranks."""

    #: Longest wait in a collective.
    timeout_s = 0.6

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[bytes]) -> None:
        super().__init__(RankEnvironment(rank=rank, local_rank=rank, world_size=2, local_size=2))
        self._barrier, self._given = barrier, given

    def gather(self, content: bytes) -> list[bytes]:
        self._barrier.wait(self.timeout_s)
        self._given[self.place.rank] = content
        self._barrier.wait(self.timeout_s)
        return list(self._given)

    def from_first(self, content: bytes) -> bytes:
        return self.gather(content)[0]

    def add_up(self, numbers) -> list[int]:
        rows = self.gather(" ".join(str(int(number)) for number in numbers).encode())
        return [
            sum(column) for column in zip(*(map(int, row.split()) for row in rows), strict=True)
        ]


def run_both(act: Callable[[ThreadRank], object]) -> list[object]:
    """What `act` gives or raises on each of two ranks."""
    barrier, given, found = threading.Barrier(2), [b"", b""], [None, None]

    def guarded(rank: int) -> None:
        try:
            found[rank] = act(ThreadRank(rank, barrier, given))
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            found[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found
