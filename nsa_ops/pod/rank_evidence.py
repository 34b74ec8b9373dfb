"""RankEvidence: what one of several ranks shows of itself, the same from the pod to the screen."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.heartbeat import Message, Phase
from nsa_ops.gpu.throttling import name_throttling
from nsa_ops.pod.rank_figures import (
    MOST_COUNT,
    MOST_MIB,
    MOST_S,
    Age,
    Celsius,
    Count,
    KnownAge,
    Mebibytes,
    Milliseconds,
    Percent,
    Seconds,
    Sentence,
    Share,
    Word,
)
from nsa_ops.quantities import count_of

#: Where ranks wait for each other: one that hangs in another phase is what they wait for.
_WAITING: Phase = "train"
#: More ranks than this are counted in a sentence, and not listed.
_LISTED = 4
#: Records of a rank that its figures are taken from.
KEPT_STEPS = 20
#: Records that must agree that batches come late.
KEPT_DATA = 3
#: A time that no clock of a trainer tells from 0: nothing is so many times as long.
_LEAST_S = 1e-6


class OwnTime(TolerantModel):
    """A logged step, and the seconds of it that were a rank's own: its batch and its work.

    What follows is time in which it waits for the other ranks.
    """

    step: int = Field(ge=0, le=MOST_COUNT)
    own_s: float = Field(ge=0, le=MOST_S)


class MemoryGrowth(TolerantModel):
    """Memory of a rank in MiB: medians of its first records, of the newest, and of those before."""

    first_mib: float = Field(ge=0, le=MOST_MIB)
    earlier_mib: float = Field(ge=0, le=MOST_MIB)
    now_mib: float = Field(ge=0, le=MOST_MIB)


class DataTimes(TolerantModel):
    """What one record of a rank says of its data.

    Attributes:
        fetch_s: The last batch alone took so long.
        p95_ms: 95th percentile over the newest batches.
        share: Part of the step in which it waited for its batch.
    """

    step: Count = 0
    fetch_s: Seconds = None
    p95_ms: Milliseconds = None
    share: Share = None


def _newest(recent: tuple[OwnTime, ...]) -> tuple[OwnTime, ...]:
    return recent[-KEPT_STEPS:]


def _newest_data(records: tuple[DataTimes, ...]) -> tuple[DataTimes, ...]:
    return records[-KEPT_DATA:]


class RankEvidence(TolerantModel):
    """What is known of one rank in one attempt at one moment; of several pods, all are one tuple.

    Attributes:
        pod: Pod it runs on, where several pods are shown together; else empty.
        msg: Of its newest heartbeat; None if it has written none in this attempt.
        phase_before_s: How long the last finished phase of the same kind took; 0 if unknown.
        beat_age_s: Seconds since its `alive_seq` moved; None without a heartbeat.
        still_s: Seconds since its loop moved or its phase changed; None without a heartbeat.
        step_s: Median of its newest records, like `work_s`, `sync_s` and `data_s`.
        own_s: Median of its `work_s` and `data_s` together, by which ranks are compared.
        recent: Its own time in its newest records, oldest first.
        data: Of its newest records that say something about data, oldest first.
        gpu_growth: Of the tensors on its card; None while there are few records, like the host's.
        gpu_mem_peak: Of its newest record in MiB, like what follows.
        problem: Why its heartbeats cannot be used; empty if they can.
    """

    rank: int = Field(ge=0, le=MOST_COUNT)
    pod: Word = ""
    msg: Message | None = None
    phase: Phase | None = None
    phase_deadline_s: Age = None
    phase_before_s: KnownAge = 0.0
    step: Count = 0
    micro_step: Count = 0
    beat_age_s: Age = None
    still_s: Age = None
    step_s: Seconds = None
    work_s: Seconds = None
    sync_s: Seconds = None
    data_s: Seconds = None
    own_s: Seconds = None
    recent: Annotated[tuple[OwnTime, ...], AfterValidator(_newest)] = ()
    data: Annotated[tuple[DataTimes, ...], AfterValidator(_newest_data)] = ()
    gpu_growth: MemoryGrowth | None = None
    host_growth: MemoryGrowth | None = None
    gpu_mem_peak: Mebibytes = None
    gpu_mem_total: Mebibytes = None
    gpu_mem_reserved: Mebibytes = None
    host_rss_mib: Mebibytes = None
    gpu_util: Percent = None
    temp_c: Celsius = None
    throttle: Word | None = None
    problem: Sentence = ""

    @property
    def held_back_by(self) -> str:
        """What holds the clocks of its card back; empty if nothing does, or nothing is known."""
        return name_throttling(self.throttle)

    def is_silent(self, stale_s: float) -> bool:
        """Whether it has written no heartbeat for longer than this, and has not ended."""
        return self.msg != "end" and self.beat_age_s is not None and self.beat_age_s > stale_s


Oddity = Literal["silence", "end", "step", "phase", "micro_step"]


@dataclass(frozen=True)
class OddRanks:
    """Ranks that differ from the others, which wait for them.

    Attributes:
        by: `silence` write no heartbeat, `end` ended alone, `step` and `micro_step` are behind,
            `phase` are in another phase.
    """

    ranks: tuple[RankEvidence, ...]
    others: tuple[RankEvidence, ...]
    by: Oddity

    @property
    def waiting(self) -> tuple[RankEvidence, ...]:
        """The others that have not ended."""
        return tuple(rank for rank in self.others if rank.msg != "end")


def find_odd(ranks: Sequence[RankEvidence], stale_s: float) -> OddRanks | None:
    """The ranks that the others wait for; None where all are at the same place.

    It compares places and knows no patience: while a run trains, ranks differ for a moment.
    """
    known = [rank for rank in ranks if rank.msg is not None and not rank.problem]
    last_step = max((rank.step for rank in known), default=0)
    last_micro_step = max((rank.micro_step for rank in known), default=0)
    usual = _WAITING if any(rank.phase == _WAITING for rank in known) else None
    tests: tuple[tuple[Oddity, list[RankEvidence]], ...] = (
        ("silence", [rank for rank in known if rank.is_silent(stale_s)]),
        ("end", [rank for rank in known if rank.msg == "end"]),
        ("step", [rank for rank in known if rank.step < last_step]),
        ("phase", [rank for rank in known if usual and rank.phase != usual]),
        ("micro_step", [rank for rank in known if rank.micro_step < last_micro_step]),
        ("phase", _smallest_group(known)),
    )
    for by, odd in tests:
        if odd and len(odd) < len(known):
            chosen = {id(rank) for rank in odd}
            others = tuple(rank for rank in known if id(rank) not in chosen)
            return OddRanks(tuple(odd), others, by)
    return None


def _smallest_group(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    groups: dict[Phase | None, list[RankEvidence]] = {}
    for rank in ranks:
        groups.setdefault(rank.phase, []).append(rank)
    return min(groups.values(), key=len, default=[])


@dataclass(frozen=True)
class RankSpread:
    """How the own time of a step differs among ranks, in seconds of their newest records.

    Attributes:
        factor: The slowest rank against the median of the others; 1 where those took no time.
    """

    fastest_s: float
    median_s: float
    slowest_s: float
    slowest: RankEvidence
    factor: float


def rank_spread(ranks: Sequence[RankEvidence]) -> RankSpread | None:
    """The spread over the ranks that say how long they work; None if fewer than two do."""
    usable = [rank for rank in ranks if rank.own_s is not None and not rank.problem]
    known = sorted(usable, key=lambda rank: rank.own_s or 0.0)
    if len(known) < 2:
        return None
    seconds = [rank.own_s or 0.0 for rank in known]
    factor = slowest_factor(seconds)
    return RankSpread(seconds[0], median(seconds), seconds[-1], known[-1], factor)


def slowest_factor(own_s: Sequence[float]) -> float:
    """The largest of two or more against the median of the others; 1 where those took no time."""
    *others, slowest = sorted(own_s)
    usual = median(others)
    return slowest / usual if usual > _LEAST_S else 1.0


def name_ranks(ranks: Sequence[RankEvidence]) -> str:
    """`rank 2`, `ranks 1 and 3`, or how many there are if they are many.

    Where pods are shown together, the one that has all of these ranks is named behind them.
    """
    pods = {rank.pod for rank in ranks}
    where = f" on pod `{ranks[0].pod}`" if len(pods) == 1 and ranks[0].pod else ""
    if len(ranks) > _LISTED:
        return count_of(len(ranks), "rank") + where
    return list_ranks([rank.rank for rank in ranks]) + where


def list_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 1, 2 and 3`, however many there are."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
