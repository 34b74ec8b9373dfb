"""RankTracker: follows one rank by its heartbeats: when it lived and moved, and its figures."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from nsa_core.rundir.heartbeat import Heartbeat, Phase
from nsa_ops.pod.rank_evidence import (
    KEPT_DATA,
    KEPT_STEPS,
    DataTimes,
    MemoryGrowth,
    OwnTime,
    RankEvidence,
)
from nsa_ops.pod.rank_figures import MOST_MIB, MOST_S, measured

#: Records of memory that a median is taken over.
MEDIAN_RECORDS = 20


@dataclass
class MemoryValues:
    """Memory of one kind in the records of a rank: the first values and the newest ones, in MiB."""

    _first: list[float] = field(default_factory=list)
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=2 * MEDIAN_RECORDS))

    def take(self, mib: int | None) -> None:
        """Take in what the next record says; one that says nothing changes nothing."""
        value = measured(mib, MOST_MIB)
        if value is None:
            return
        if len(self._first) < MEDIAN_RECORDS:
            self._first.append(value)
        self._newest.append(value)

    def growth(self) -> MemoryGrowth | None:
        """How it has grown; None before there are two medians of the newest values."""
        newest = list(self._newest)
        if len(newest) < 2 * MEDIAN_RECORDS:
            return None
        return MemoryGrowth(
            first_mib=median(self._first),
            earlier_mib=median(newest[:MEDIAN_RECORDS]),
            now_mib=median(newest[MEDIAN_RECORDS:]),
        )


@dataclass
class RankTracker:
    """One rank of one attempt; its caller says when it saw a beat, by any one clock.

    Attributes:
        last: Newest heartbeat; None before the first.
        durations_s: How long the last finished phase of each kind took.
        problem: Why its heartbeats cannot be used; empty if they can.
    """

    rank: int = 0
    last: Heartbeat | None = None
    durations_s: dict[Phase, float] = field(default_factory=dict)
    problem: str = ""
    _alive_at: float = 0.0
    _still_since: float = 0.0
    _phase_since: float = 0.0
    _records: deque[Heartbeat] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _last_record: Heartbeat | None = None
    _gpu: MemoryValues = field(default_factory=MemoryValues)
    _host: MemoryValues = field(default_factory=MemoryValues)
    _data: deque[DataTimes] = field(default_factory=lambda: deque(maxlen=KEPT_DATA))

    def take(self, beat: Heartbeat, at_s: float) -> None:
        """Take in the next beat."""
        last = self.last
        if last is None or beat.phase != last.phase:
            if last is not None:
                self.durations_s[last.phase] = at_s - self._phase_since
            self._phase_since = self._still_since = at_s
        if last is None or beat.alive_seq != last.alive_seq:
            self._alive_at = at_s
        moved = last is None or beat.progress_seq != last.progress_seq
        if moved:
            self._alive_at = self._still_since = at_s
        if beat.msg == "progress" and (not self._records or beat.step > self._records[-1].step):
            self._records.append(beat)
        if is_record(beat) and (self._last_record is None or is_new(beat, self._last_record)):
            self._take_record(beat)
        self.last = beat

    def _take_record(self, record: Heartbeat) -> None:
        self._last_record = record
        self._gpu.take(record.gpu_mem_alloc)
        self._host.take(record.host_rss_mib)
        times = data_times(record)
        if times is not None:
            self._data.append(times)

    def alive_age_s(self, now_s: float) -> float:
        """Seconds since it showed life; 0 before the first beat."""
        return now_s - self._alive_at if self.last else 0.0

    def still_s(self, now_s: float) -> float:
        """Seconds since its loop moved or its phase changed; 0 before the first beat."""
        return now_s - self._still_since if self.last else 0.0

    def evidence(self, now_s: float) -> RankEvidence:
        """What is known of it now."""
        last = self.last
        if last is None:
            return RankEvidence(rank=self.rank, problem=self.problem)
        records = list(self._records)
        own = [(beat.step, own_time_s(beat)) for beat in records]
        return RankEvidence(
            rank=self.rank,
            msg=last.msg,
            phase=last.phase,
            phase_deadline_s=last.phase_deadline_s,
            phase_before_s=self.durations_s.get(last.phase, 0.0),
            step=last.step,
            micro_step=last.micro_step,
            beat_age_s=max(0.0, self.alive_age_s(now_s)),  # the pod's clock may have been set back
            still_s=max(0.0, self.still_s(now_s)),
            step_s=_median([beat.step_s for beat in records]),
            work_s=_median([beat.work_s for beat in records]),
            sync_s=_median([beat.sync_s for beat in records]),
            data_s=_median([beat.data_s for beat in records]),
            own_s=_median([seconds for _, seconds in own]),
            recent=tuple(OwnTime(step=step, own_s=s) for step, s in own if s is not None),
            problem=self.problem,
            **self._machine(last),
        )

    def brief(self) -> RankEvidence:
        """What it says of its data, its memory and its card alone."""
        if self.last is None:
            return RankEvidence(rank=self.rank, problem=self.problem)
        return RankEvidence(rank=self.rank, problem=self.problem, **self._machine(self.last))

    def _machine(self, last: Heartbeat) -> dict[str, Any]:
        newest = self._records[-1] if self._records else last
        return {
            "data": tuple(self._data),
            "gpu_growth": self._gpu.growth(),
            "host_growth": self._host.growth(),
            "gpu_mem_peak": newest.gpu_mem_peak,
            "gpu_mem_total": newest.gpu_mem_total,
            "gpu_mem_reserved": newest.gpu_mem_reserved,
            "host_rss_mib": newest.host_rss_mib,
            "gpu_util": newest.gpu_util,
            "temp_c": newest.temp_c,
            "throttle": newest.throttle,
        }


def is_record(beat: Heartbeat) -> bool:
    """Whether a beat records training steps: progress, or a step that was skipped."""
    return beat.msg == "progress" or (beat.msg == "anomaly" and beat.finite is False)


def is_new(beat: Heartbeat, last: Heartbeat) -> bool:
    """Whether a record is not a repetition of the last one."""
    return (beat.progress_seq, beat.step, beat.msg) != (last.progress_seq, last.step, last.msg)


def data_times(record: Heartbeat) -> DataTimes | None:
    """What a record says of the data of its rank; None if it says nothing."""
    if record.dt_fetch_s is None and record.fetch_p95_ms is None and record.data_s is None:
        return None
    share = None
    if record.data_s is not None and record.step_s:
        share = min(record.data_s / record.step_s, 1.0)
    return DataTimes(
        step=record.step, fetch_s=record.dt_fetch_s, p95_ms=record.fetch_p95_ms, share=share
    )


def own_time_s(record: Heartbeat) -> float | None:
    """Seconds of a step that a rank took before it waited for the others: its batch and its work.

    None where it does not say how long it worked.
    """
    work_s, data_s = measured(record.work_s, MOST_S), measured(record.data_s, MOST_S)
    return None if work_s is None else measured(work_s + (data_s or 0.0), MOST_S)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for one in values if (value := measured(one, MOST_S)) is not None]
    return median(known) if known else None
