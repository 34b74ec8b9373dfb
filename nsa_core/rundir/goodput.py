"""goodput.json: where the wall time of a run went, every second in one bucket."""

from typing import Literal

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_last_records, read_model
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir

#: Heartbeats that are searched for the last move of a hung loop: hours of them.
_HANG_BYTES = 2**20

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


def read_goodput(run: RunDir) -> Goodput | None:
    """The last record; None without one that can be read."""
    try:
        return read_model(Goodput, run.goodput)
    except (OSError, ValueError):
        return None


def write_goodput(run: RunDir, record: Goodput) -> None:
    """Replace goodput.json."""
    write_text(run.goodput, record.model_dump_json(indent=2) + "\n")


def add_unrecorded(before: Goodput, *, moved_unix_s: float, ended_unix_s: float) -> Goodput:
    """A record that reaches to the end of its attempt; pure.

    Seconds between the last record and the last step were trained and never recorded: they count
    as lost. From there to the end of the attempt the loop made no progress: that counts as hang.

    Args:
        before: The last record.
        moved_unix_s: When the loop moved last.
        ended_unix_s: When the attempt ended.
    """
    moved = max(moved_unix_s, before.updated_unix_s)
    ended = max(ended_unix_s, moved)
    buckets = dict(before.buckets)
    lost = buckets.get("rollback_lost", 0.0) + moved - before.updated_unix_s
    hang = buckets.get("hang", 0.0) + ended - moved
    buckets |= {"rollback_lost": round(lost, 3), "hang": round(hang, 3)}
    wall_s = ended - before.began_unix_s
    return before.model_copy(
        update={
            "buckets": buckets,
            "updated_unix_s": ended,
            "wall_s": round(wall_s, 3),
            "goodput": round(buckets.get("step", 0.0) / wall_s, 4) if wall_s > 0 else 0.0,
        }
    )


def read_moved(run: RunDir, attempt: int) -> float | None:
    """When the loop of an attempt moved last, by its heartbeats; None without any."""
    beats = read_last_records(run.heartbeat(), Heartbeat, _HANG_BYTES).records
    ours = [beat for beat in beats if beat.attempt == attempt]
    newest = max((beat.progress_seq for beat in ours), default=0)
    return min((beat.ts for beat in ours if beat.progress_seq == newest), default=None)


def record_hang(run: RunDir, ended: ExitRecord) -> None:
    """Record in goodput.json how long a hung attempt made no progress; repeating changes nothing.

    Raises:
        OSError: If it cannot be written.
    """
    before, moved = read_goodput(run), read_moved(run, ended.attempt)
    if ended.code == TrainerExit.HANG and before is not None and moved is not None:
        write_goodput(run, add_unrecorded(before, moved_unix_s=moved, ended_unix_s=ended.at))
