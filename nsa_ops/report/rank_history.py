"""What each rank of a run did, from its heartbeats: bounded, and summed up rank by rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from nsa_core.config.training import MAX_RANKS
from nsa_core.rundir.bounded_json import MAX_HISTORY_BYTES, read_last_records
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.gpu.throttling import name_throttling
from nsa_ops.pod.rank_evidence import slowest_factor
from nsa_ops.pod.rank_figures import MOST_C, MOST_MIB, MOST_S, measured
from nsa_ops.pod.rank_files import is_of_rank
from nsa_ops.pod.rank_tracker import own_time_s
from nsa_ops.quantities import count_of, format_bytes, format_seconds

#: The most that is read of the heartbeats of a rank that is not the first: 25,000 lines.
_BYTES_OF_EACH = 8 * 2**20
COLUMNS = (
    "rank", "records", "own time of a step", "its batch of that", "waits for the batches of others",
    "peak GPU memory", "host memory", "hottest", "throttled",
)  # fmt: skip


@dataclass(frozen=True)
class RankSummary:
    """One rank over all records that were read of it; None is unknown.

    Attributes:
        own_s: Median of what it took in a step before it waited for others: its batch and its work.
        data_s: Median of what it waited for its batch.
        sync_s: Median of what it waited until all ranks had their batch.
        gpu_mem_peak: Highest in MiB, likewise the host's.
        temp_c: Highest.
        throttled_share: Of its records, those in which its clocks were throttled, 0 to 1.
    """

    rank: int
    num_records: int
    own_s: float | None = None
    own_least_s: float | None = None
    own_most_s: float | None = None
    data_s: float | None = None
    sync_s: float | None = None
    gpu_mem_peak: int | None = None
    host_rss_mib: int | None = None
    temp_c: float | None = None
    throttled_share: float | None = None


@dataclass(frozen=True)
class RankHistory:
    """All ranks of a run directory.

    Attributes:
        ranks: One summary for each rank that the run has there; empty where the run has one.
        own_times: Seconds that the fastest, the median and the slowest rank took, by step.
    """

    ranks: tuple[RankSummary, ...] = ()
    own_times: tuple[tuple[int, float, float, float], ...] = ()

    @property
    def slowest(self) -> RankSummary | None:
        """The rank with the largest median; None if fewer than two ranks say how long they work."""
        known = [rank for rank in self.ranks if rank.own_s is not None]
        return max(known, key=lambda rank: rank.own_s or 0.0) if len(known) > 1 else None


def read_rank_history(
    run: RunDir, manifest: RunManifest | None, beats: Sequence[Heartbeat], missing: list[str]
) -> RankHistory:
    """Read the heartbeats of all ranks of a run with several; what is missing is noted.

    `beats`: progress of rank 0, which was read before.
    """
    if manifest is None or manifest.config.num_ranks == 1:
        return RankHistory()
    ranks = manifest.pod_ranks[:MAX_RANKS]
    summaries: list[RankSummary] = []
    by_step: dict[int, list[float]] = {}
    for rank in ranks:
        records = [beat for beat in beats if is_of_rank(beat, rank, manifest.run_id)]
        if rank > 0:
            window = min(_BYTES_OF_EACH, MAX_HISTORY_BYTES // len(ranks))
            records = _read_records(run, manifest.run_id, rank, window, missing)
        summaries.append(_summarize(rank, records))
        own = {beat.step: s for beat in records if (s := own_time_s(beat)) is not None}
        for step, own_s in own.items():
            by_step.setdefault(step, []).append(own_s)
    spread = [
        (step, min(seconds), median(seconds), max(seconds))
        for step, seconds in sorted(by_step.items())
        if len(seconds) > 1
    ]
    return RankHistory(tuple(summaries), tuple(spread))


def _read_records(
    run: RunDir, run_id: str, rank: int, window: int, missing: list[str]
) -> list[Heartbeat]:
    path = run.heartbeat(rank)
    found = read_last_records(path, Heartbeat, window)
    usable = [beat for beat in found.records if is_of_rank(beat, rank, run_id)]
    records = [beat for beat in usable if beat.msg == "progress"]
    num_bad = len(found.records) - len(usable) + found.torn
    if found.problem:
        missing.append(found.problem)
    elif not path.exists():
        missing.append(f"{path.name} is missing")
    elif num_bad:
        lines = count_of(num_bad, "line")
        missing.append(f"{path.name}: {lines} cannot be used as heartbeats of rank {rank}")
    elif not records:
        missing.append(f"{path.name} has no record of a step")
    if not found.problem and path.exists() and path.stat().st_size > window:
        missing.append(f"{path.name} is longer than {format_bytes(window)}: only its end was read")
    return records


def _summarize(rank: int, records: Sequence[Heartbeat]) -> RankSummary:
    def values(of: Callable[[Heartbeat], float | None], most: float) -> list[float]:
        return [value for beat in records if (value := measured(of(beat), most)) is not None]

    own = values(own_time_s, MOST_S)
    data = values(lambda beat: beat.data_s, MOST_S)
    sync = values(lambda beat: beat.sync_s, MOST_S)
    throttles = [beat.throttle for beat in records if beat.throttle]
    peak = max(values(lambda beat: beat.gpu_mem_peak, MOST_MIB), default=None)
    host = max(values(lambda beat: beat.host_rss_mib, MOST_MIB), default=None)
    throttled = [reason for reason in throttles if name_throttling(reason)]
    return RankSummary(
        rank=rank,
        num_records=len(records),
        own_s=median(own) if own else None,
        own_least_s=min(own, default=None),
        own_most_s=max(own, default=None),
        data_s=median(data) if data else None,
        sync_s=median(sync) if sync else None,
        gpu_mem_peak=None if peak is None else int(peak),
        host_rss_mib=None if host is None else int(host),
        temp_c=max(values(lambda beat: beat.temp_c, MOST_C), default=None),
        throttled_share=len(throttled) / len(records) if throttles else None,
    )


def describe_spread(history: RankHistory) -> str:
    """The slowest rank beside the others in one sentence; empty where that is unknown."""
    slowest = history.slowest
    if slowest is None or slowest.own_s is None:
        return ""
    own = sorted(rank.own_s for rank in history.ranks if rank.own_s is not None)
    return (
        f"Rank {slowest.rank} is the slowest: {format_seconds(slowest.own_s)} own time a step, "
        f"{slowest_factor(own):.2f} times the others. Of all ranks the fastest takes "
        f"{format_seconds(own[0])}, the median {format_seconds(median(own))}."
    )


def rank_cells(history: RankHistory) -> list[tuple[str, ...]]:
    """A row of cells for each rank, in the order of `COLUMNS`."""
    return [
        (
            str(rank.rank),
            f"{rank.num_records:,}",
            _own(rank),
            _shown(rank.data_s, format_seconds),
            _shown(rank.sync_s, format_seconds),
            _shown(rank.gpu_mem_peak, lambda mib: f"{mib:,.0f} MiB"),
            _shown(rank.host_rss_mib, lambda mib: f"{mib:,.0f} MiB"),
            _shown(rank.temp_c, lambda celsius: f"{celsius:.0f} degrees C"),
            _shown(rank.throttled_share, lambda share: f"{100 * share:.0f} % of the records"),
        )
        for rank in history.ranks
    ]


def _own(rank: RankSummary) -> str:
    if rank.own_s is None or rank.own_least_s is None or rank.own_most_s is None:
        return "unknown"
    least, most = format_seconds(rank.own_least_s), format_seconds(rank.own_most_s)
    return f"{format_seconds(rank.own_s)} ({least} to {most})"


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "unknown" if value is None else form(value)
