"""Wait for torchrun, see when each rank goes, and leave nothing behind that hangs."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nsa_core.rundir.process import is_alive
from nsa_core.rundir.ranks import read_rank_end
from nsa_ops.pod.trainer_group import TrainerGroup

POLL_S = 0.1
#: After a rank has gone without a word, the others have so long: the 25 s that each takes at most
#: from the TERM that torchrun sends it, which takes a moment. torchrun alone would wait for 30 s.
TOGETHER_S = 25.5
#: After that torchrun has so long to report and end: all is gone within 30 s.
TORCHRUN_S = 2.0
#: torchrun reports and ends within so long of its last rank; other pods may still save.
REPORT_S = 60.0


@dataclass
class RankSightings:
    """What the runner saw of the ranks of its pod.

    Attributes:
        last_seen: By rank, the last time at which it ran (Unix seconds), once it is gone.
        stuck: Ranks that outlived the others until they were killed for it.
        torchrun_first: torchrun ended while all its ranks ran.
    """

    last_seen: dict[int, float] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    torchrun_first: bool = False


class RankWatch:
    """Looks after the ranks of one attempt until torchrun has ended."""

    def __init__(self, group: TrainerGroup, report: Callable[[str, list[int]], None]) -> None:
        """`report` is called with what was killed and why."""
        self._group = group
        self._report = report
        self._running: set[int] = set()
        self._looked_at: float | None = None
        self._lost_at: float | None = None
        self._empty_at: float | None = None
        self._killed_at: float | None = None
        self.seen = RankSightings()

    def wait(self, torchrun: "subprocess.Popen[bytes]") -> int:
        """The code of torchrun; afterwards `seen` is complete."""
        while True:
            code = torchrun.poll()
            self.look(time.time(), time.monotonic())
            if code is not None:
                self.seen.torchrun_first = bool(self._running) and not self.seen.last_seen
                return code
            time.sleep(POLL_S)

    def look(self, now_unix_s: float, now_s: float) -> None:
        """One look, at a time by both clocks; kills what has outlived its time."""
        members = self._group.members()
        living = {rank for rank, identity in members.items() if is_alive(identity)}
        for rank in members.keys() - living - self.seen.last_seen.keys():
            self.seen.last_seen[rank] = self._looked_at or now_unix_s
            if self._lost_at is None and self._went_without_a_word(rank):
                self._lost_at = now_s
        self._running, self._looked_at = living, now_unix_s
        is_empty = bool(self.seen.last_seen) and not self._running
        self._empty_at = (self._empty_at or now_s) if is_empty else None
        if _has_passed(self._killed_at, TORCHRUN_S, now_s):
            self._report("torchrun did not end after its ranks", self._group.kill())
        elif self._killed_at is None and _has_passed(self._lost_at, TOGETHER_S, now_s):
            self._end_the_rest(now_s)
        elif _has_passed(self._empty_at, REPORT_S, now_s):
            why = f"torchrun still ran {REPORT_S:.0f} s after its last rank"
            self._report(why, self._group.kill())

    def _end_the_rest(self, now_s: float) -> None:
        self.seen.stuck |= self._running
        self._killed_at = now_s
        ranks = ", ".join(map(str, sorted(self._running)))
        why = f"rank {ranks} still ran {TOGETHER_S:.1f} s after another one was gone"
        self._report(why, self._group.kill_ranks())

    def _went_without_a_word(self, rank: int) -> bool:
        """Whether it was killed, or followed another one; those that agreed may take their time."""
        end = read_rank_end(self._group.run, rank, self._group.attempt)
        return end is None or end.follows


def _has_passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s > limit_s
