"""Where the wall time of a run went: every second in exactly one bucket, over all attempts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from pydantic import ValidationError

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.layout import RunDir

Bucket = Literal[
    "provision", "init", "compile", "data_wait", "step", "eval", "checkpoint_stall",
    "rollback_lost", "hang", "down",
]  # fmt: skip


class Goodput(TolerantModel):
    """Content of goodput.json.

    Attributes:
        began_unix_s: When the first attempt was launched.
        updated_unix_s: Until when the buckets count.
        attempt: Attempt that wrote it.
        step: Optimizer steps done.
        buckets: Seconds by bucket.
        wall_s: Seconds between the two times.
        goodput: Share of the wall time that went into steps which still count.
    """

    schema_version: int = 1
    began_unix_s: float
    updated_unix_s: float
    attempt: int
    step: int
    buckets: dict[str, float]
    wall_s: float
    goodput: float


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


def start_clock(
    run: RunDir,
    *,
    launched_unix_s: float,
    last_alive_unix_s: float | None,
    hung_since_unix_s: float | None = None,
) -> GoodputClock:
    """The clock of this attempt, continuing the record of the attempts before.

    Seconds between the last record and the last sign of life were trained and never recorded, so
    they count as lost; what a hung loop stood still of it counts as hang; from there until now the
    run was down.

    Args:
        run: Run directory.
        launched_unix_s: Creation time of this attempt's manifest.
        last_alive_unix_s: Time of the last heartbeat of any earlier attempt.
        hung_since_unix_s: When its loop moved last, if it was ended because it hung.
    """
    now = time.time()
    before = read_goodput(run)
    if before is None:
        began = min(launched_unix_s, now)
        return GoodputClock(began, {"provision": now - began})
    buckets = dict(before.buckets)
    alive = min(max(last_alive_unix_s or 0.0, before.updated_unix_s), now)
    moved = alive if hung_since_unix_s is None else hung_since_unix_s
    moved = min(max(moved, before.updated_unix_s), alive)
    buckets["rollback_lost"] = buckets.get("rollback_lost", 0.0) + moved - before.updated_unix_s
    buckets["hang"] = buckets.get("hang", 0.0) + alive - moved
    buckets["down"] = buckets.get("down", 0.0) + now - alive
    return GoodputClock(before.began_unix_s, buckets)


def read_goodput(run: RunDir) -> Goodput | None:
    """The last record; None without one that can be read."""
    try:
        return Goodput.model_validate_json(run.goodput.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def write_goodput(run: RunDir, record: Goodput) -> None:
    """Replace goodput.json."""
    write_text(run.goodput, record.model_dump_json(indent=2) + "\n")
