"""How fast the steps are, and where the wall time of an attempt goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

from nsa_core.rundir.exit import TrainerExit, read_exit
from nsa_core.rundir.goodput import Bucket, Goodput, add_unrecorded, read_goodput, read_moved
from nsa_core.rundir.layout import RunDir


@dataclass(frozen=True)
class Rate:
    """Speed since the last log line; None if only a first, compiling step lies in between."""

    tokens_per_s: float | None
    mfu: float | None
    step_s: float
    data_s: float


class Meter:
    """Adds up the steps between two log lines; the first steps of an attempt are not counted.

    Args:
        train_flops_per_token: NSA's own FLOPs, forward and backward.
        peak_flops_per_s: Of one card; None on an unknown card.
        num_ranks: Ranks, each with a card of its own.
        num_warmup_steps: Steps that compile or fill caches.
    """

    def __init__(
        self,
        train_flops_per_token: float,
        peak_flops_per_s: float | None,
        num_warmup_steps: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self._flops_per_token = train_flops_per_token
        self._peak = None if peak_flops_per_s is None else peak_flops_per_s * num_ranks
        self._num_left = num_warmup_steps
        self._num_tokens = 0
        self._step_s = self._data_s = 0.0
        self._last_step_s = self._last_data_s = 0.0

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step is one of those that are not counted."""
        return self._num_left > 0

    @property
    def is_last_warmup(self) -> bool:
        """Whether the next step is the last of those that are not counted."""
        return self._num_left == 1

    def add(self, num_tokens: int, step_s: float, data_s: float) -> None:
        """One step: its tokens, the seconds of computing and of waiting for data."""
        self._last_step_s, self._last_data_s = step_s, data_s
        if self._num_left:
            self._num_left -= 1
            return
        self._num_tokens += num_tokens
        self._step_s += step_s
        self._data_s += data_s

    def take(self) -> Rate:
        """The rate since the last call."""
        elapsed_s = self._step_s + self._data_s
        rate = self._num_tokens / elapsed_s if elapsed_s > 0 else None
        self._num_tokens, self._step_s, self._data_s = 0, 0.0, 0.0
        return Rate(rate, self.mfu(rate), self._last_step_s, self._last_data_s)

    def mfu(self, tokens_per_s: float | None) -> float | None:
        """Share of the cards' peak that this rate uses; None where either is unknown."""
        if tokens_per_s is None or self._peak is None:
            return None
        return tokens_per_s * self._flops_per_token / self._peak


class GoodputClock:
    """Adds the seconds since the last switch to the bucket that was current."""

    def __init__(
        self,
        began_unix_s: float,
        buckets: dict[str, float],
        *,
        wall: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._began_unix_s = began_unix_s
        self._buckets = {name: buckets.get(name, 0.0) for name in get_args(Bucket)}
        self._ticks = ticks
        self._wall_offset_s = wall() - ticks()
        self._current: Bucket = "init"
        self._since = ticks()

    def switch(self, bucket: Bucket) -> Bucket:
        """Count from now into `bucket`; returns the bucket before."""
        now = self._ticks()
        self._buckets[self._current] += now - self._since
        self._since = now
        before, self._current = self._current, bucket
        return before

    @contextmanager
    def within(self, bucket: Bucket) -> Iterator[None]:
        """Count the body into `bucket`, then go back to the bucket before."""
        before = self.switch(bucket)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self, bucket: Bucket) -> float:
        """Seconds in a bucket until now."""
        self.switch(self._current)
        return self._buckets[bucket]

    def lose_steps(self, kept_step_s: float) -> None:
        """Training beyond the resumed checkpoint has to be done again: it was lost."""
        lost = max(0.0, self._buckets["step"] - kept_step_s)
        self._buckets["step"] -= lost
        self._buckets["rollback_lost"] += lost

    def read(self, *, attempt: int, step: int) -> Goodput:
        """The record until now."""
        self.switch(self._current)
        wall_s = self._since + self._wall_offset_s - self._began_unix_s
        return Goodput(
            began_unix_s=self._began_unix_s,
            updated_unix_s=self._since + self._wall_offset_s,
            attempt=attempt,
            step=step,
            buckets={name: round(value, 3) for name, value in self._buckets.items()},
            wall_s=round(wall_s, 3),
            goodput=round(self._buckets["step"] / wall_s, 4) if wall_s > 0 else 0.0,
        )


def start_clock(run: RunDir, *, attempt: int, last_alive_unix_s: float | None) -> GoodputClock:
    """The clock of this attempt; it continues the record of the attempts before.

    From the end of the attempt before until now the run was down. All times are of this machine;
    where its clock was set back since, time continues from the latest recorded time, and the
    beginning moves with it: no second is negative, and the sum stays the wall time.

    Args:
        run: Run directory.
        attempt: Number of this attempt.
        last_alive_unix_s: Time of the last heartbeat of any earlier attempt.
    """
    read = time.time()
    before = read_goodput(run)
    if before is None:
        began = min(run.manifest.stat().st_mtime, read)
        return GoodputClock(began, {"provision": read - began})
    ended = _to_its_end(run, before, attempt - 1, last_alive_unix_s or 0.0)
    now = max(read, ended.updated_unix_s)
    buckets = dict(ended.buckets)
    buckets["down"] = buckets.get("down", 0.0) + now - ended.updated_unix_s
    return GoodputClock(before.began_unix_s - (now - read), buckets, wall=lambda: read)


def _to_its_end(run: RunDir, before: Goodput, attempt: int, last_alive_unix_s: float) -> Goodput:
    """The record of an attempt up to where it ended, or showed its last sign of life."""
    record = read_exit(RunDir(run.attempt(attempt)))
    moved = read_moved(run, attempt)
    if record is None or record.code != TrainerExit.HANG or moved is None:
        return add_unrecorded(
            before, moved_unix_s=last_alive_unix_s, ended_unix_s=last_alive_unix_s
        )
    return add_unrecorded(before, moved_unix_s=moved, ended_unix_s=record.at)
