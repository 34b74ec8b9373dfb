"""Which charts a report has, and which numbers of the run each of them draws."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.rank_figures import MOST_MIB, measured
from nsa_ops.quantities import format_count
from nsa_ops.report.axes import running_median
from nsa_ops.report.record import LoggedStep, RecordedRun, join_attempts
from nsa_ops.report.summary import validation_points
from nsa_ops.report.svg import Chart, Marker, Point, Series

TREND_FROM = 40
BRANCHES = ("compressed", "selected", "sliding")
SHARE_OF_POINTS_IN_TREND = 30


def figures(record: RecordedRun) -> list[Chart]:
    """All charts of the report in reading order; those without data have no series."""
    beats = joined_beats(record.beats)
    moments = attempt_moments(record)
    charts = [
        _loss(record),
        _bits_per_byte(record),
        _throughput(record),
        *_time_of_ranks(record),
        _memory(beats),
        _gate_shares(beats),
        _gate_entropy(record, beats),
        _gradient(record),
        _learning_rate(record),
    ]
    return [_with_moments(chart, moments) for chart in charts]


def _with_moments(chart: Chart, moments: Sequence[Marker]) -> Chart:
    return replace(chart, moments=moments)


def attempt_moments(record: RecordedRun) -> list[Marker]:
    """The step at which each attempt after the first begins."""
    rows = record.training.rows if record.training else []
    moments = []
    for before, after in pairwise(rows):
        if after.attempt != before.attempt:
            moments.append(Marker(after.step, f"attempt {after.attempt} begins", "resumed"))
    return moments


def joined_beats(beats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """One progress heartbeat a step, the last attempt counting where steps were done again."""
    by_position = {(beat.attempt, beat.step): beat for beat in beats}
    rows = join_attempts([LoggedStep(attempt, step) for attempt, step in by_position])
    return [by_position[row.attempt, row.step] for row in rows]


def _column(record: RecordedRun, name: str) -> list[Point]:
    return record.training.column(name) if record.training else []


def _with_trend(label: str, points: Sequence[Point], css: str) -> list[Series]:
    """Raw data, and the running median before it where there are enough points for one."""
    if len(points) < TREND_FROM:
        return [Series(label, points, css)] if points else []
    width = max(5, len(points) // SHARE_OF_POINTS_IN_TREND) | 1
    return [
        Series(label, points, f"{css} faint"),
        Series(f"median of {width} records", running_median(points, width), css),
    ]


def _loss(record: RecordedRun) -> Chart:
    series = _with_trend("training loss", _column(record, "loss"), "s1")
    validation = record.validation.column("val_loss") if record.validation else []
    if validation:
        series.append(Series("held-out loss", validation, "s2", dots=True))
    return Chart("Loss", "nats per token", series)


def _bits_per_byte(record: RecordedRun) -> Chart:
    points = validation_points(record)
    series = [Series("held-out text", points, "s2", dots=True)] if points else []
    return Chart("Validation", "bits per byte of held-out text", series)


def _throughput(record: RecordedRun) -> Chart:
    series = _with_trend("throughput", _column(record, "tokens_per_s"), "s1")
    return Chart("Throughput", "tokens per second", series, y_low=0, format_y=format_count)


def _time_of_ranks(record: RecordedRun) -> Iterator[Chart]:
    """What the fastest, the median and the slowest rank take in a step; only for several ranks."""
    times = record.ranks.own_times
    if times:
        series = [
            Series("slowest rank", [(step, slowest) for step, _, _, slowest in times], "s2"),
            Series("median of ranks", [(step, middle) for step, _, middle, _ in times], "s1"),
            Series("fastest rank", [(step, fastest) for step, fastest, _, _ in times], "s3"),
        ]
        yield Chart(
            "Own time of ranks", "seconds of a step before waiting for others", series, y_low=0
        )


def _beat_series(
    label: str, beats: Sequence[Heartbeat], css: str, value: Callable[[Heartbeat], float | None]
) -> Iterator[Series]:
    points = [(beat.step, number) for beat in beats if (number := value(beat)) is not None]
    if points:
        yield Series(label, points, css)


def _memory(beats: Sequence[Heartbeat]) -> Chart:
    series = [
        *_beat_series("GPU reserved", beats, "s3", lambda beat: _gib(beat.gpu_mem_reserved)),
        *_beat_series("GPU peak", beats, "s2", lambda beat: _gib(beat.gpu_mem_peak)),
        *_beat_series("GPU allocated", beats, "s1", lambda beat: _gib(beat.gpu_mem_alloc)),
        *_beat_series("host resident", beats, "s4", lambda beat: _gib(beat.host_rss_mib)),
    ]
    return Chart("Memory", "GiB", series, y_low=0)


def _gib(mib: float | None) -> float | None:
    known = measured(mib, MOST_MIB)
    return None if known is None else known / 1024


def _share(beat: Heartbeat, branch: int) -> float | None:
    shares = beat.gate_branch_shares
    if shares is None or len(shares) != len(BRANCHES) or not all(map(math.isfinite, shares)):
        return None
    return shares[branch]


def _gate_shares(beats: Sequence[Heartbeat]) -> Chart:
    series: list[Series] = []
    for index, name in enumerate(BRANCHES):
        share = partial(_share, branch=index)
        series.extend(_beat_series(name, beats, f"s{index + 1}", share))
    return Chart(
        "Gate shares", "share of each branch, worst layer", series, y_low=0, y_high=1, stacked=True
    )


def _gate_entropy(record: RecordedRun, beats: Sequence[Heartbeat]) -> Chart:
    thresholds = [Marker(math.log(3), "ln 3: all branches are used alike", "quiet")]
    if record.manifest:
        limits = record.manifest.config.watchdog
        thresholds += [
            Marker(limits.gate_entropy_warn, "a mean below this warns", "warn"),
            Marker(limits.gate_entropy_halt, "a mean below this halts", "bad"),
        ]
    series = [
        *_beat_series("mean", beats, "s1", lambda beat: beat.gate_entropy_mean),
        *_beat_series("lowest", beats, "s3", lambda beat: beat.gate_entropy_min),
    ]
    return Chart(
        "Gate entropy", "nats, worst layer", series, thresholds=thresholds, y_low=0, y_high=1.2
    )


def _gradient(record: RecordedRun) -> Chart:
    series = _with_trend("gradient norm", _column(record, "grad_norm"), "s1")
    return Chart("Gradient norm", "before clipping", series, y_low=0)


def _learning_rate(record: RecordedRun) -> Chart:
    points = _column(record, "lr")
    series = [Series("learning rate", points, "s1")] if points else []
    return Chart("Learning rate", "per step", series, y_low=0)
