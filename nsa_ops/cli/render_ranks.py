"""Draw the ranks of a run: their spread in a few lines, and one line for each of them."""

from collections.abc import Callable, Sequence

from nsa_ops.cli.screen import ScreenLine
from nsa_ops.pod.messages import RunReport
from nsa_ops.pod.rank_evidence import (
    OddRanks,
    RankEvidence,
    find_odd,
    name_ranks,
    rank_spread,
)
from nsa_ops.quantities import count_of, format_duration, format_seconds
from nsa_ops.runs.choose import LIVE

#: A rank writes a heartbeat every 10 s: one that is silent for longer than this has missed some.
_SILENT_S = 60.0
#: Ranks differ for a moment while they train; those that have not moved for so long do not.
_STILL_S = 30.0
#: Lines for ranks; what is left out is in `--json`.
_MOST_LINES = 64
_POD_WIDTH = 12
_SLOWEST = "slowest"
#: Headings with their widths: 80 columns in all.
_COLUMNS = (
    ("RANK", 4), ("PHASE", 10), ("STEP", 8), ("BEAT", 6), ("OWN", 7), ("PEAK MIB", 8),
    ("HOST MIB", 8), ("TEMP", 4), ("NOTE", 9),
)  # fmt: skip


def rank_rows(report: RunReport) -> list[ScreenLine]:
    """How the ranks differ: own time, memory, cards, and who keeps the others waiting.

    A run with one rank has none of these.
    """
    if not report.ranks:
        return []
    is_slow = any(one.rule == "straggler" for one in report.verdict.findings)
    rows = [ScreenLine("ranks", _spread_text(report.ranks), "yellow" if is_slow else "")]
    rows += _memory_rows(report.ranks) + _card_rows(report.ranks)
    if report.state not in LIVE:
        return rows
    silent = [rank for rank in report.ranks if rank.is_silent(_SILENT_S)]
    if silent:
        age_s = max(rank.beat_age_s or 0.0 for rank in silent)
        text = f"{name_ranks(silent)}, up to {format_duration(age_s)} without a heartbeat"
        rows.append(ScreenLine("silent", text, "yellow"))
    odd = _settled_odd(report.ranks)
    return [*rows, ScreenLine("waiting", _odd_text(odd), "yellow")] if odd else rows


def _spread_text(ranks: Sequence[RankEvidence]) -> str:
    spread = rank_spread(ranks)
    count = count_of(len(ranks), "rank")
    if spread is None:
        return count
    fastest, slowest = format_seconds(spread.fastest_s), format_seconds(spread.slowest_s)
    return (
        f"{count}, own time of a step {fastest} to {slowest}, "
        f"median {format_seconds(spread.median_s)};"
        f" slowest is {name_ranks([spread.slowest])} ({spread.factor:.2f} times the others)"
    )


def _memory_rows(ranks: Sequence[RankEvidence]) -> list[ScreenLine]:
    """The range over the ranks, and which of them has most."""
    known = (
        ("peak", [(rank.gpu_mem_peak, rank.rank) for rank in ranks]),
        ("reserved", [(rank.gpu_mem_reserved, rank.rank) for rank in ranks]),
        ("host", [(rank.host_rss_mib, rank.rank) for rank in ranks]),
    )
    parts = [f"{name} {text}" for name, values in known if (text := _range(values))]
    return [ScreenLine("memory", ", ".join(parts))] if parts else []


def _range(values: Sequence[tuple[int | None, int]]) -> str:
    known = sorted((value, rank) for value, rank in values if value is not None)
    if not known:
        return ""
    (least, _), (most, rank) = known[0], known[-1]
    if least == most:
        return f"{most:,} MiB"
    return f"{least:,} to {most:,} MiB (most on rank {rank})"


def _card_rows(ranks: Sequence[RankEvidence]) -> list[ScreenLine]:
    """Use, temperatures and throttled clocks, where cards tell them."""
    parts = []
    busy = [rank.gpu_util for rank in ranks if rank.gpu_util is not None]
    if busy:
        least, most = f"{min(busy):.0f}", f"{max(busy):.0f}"
        parts.append(f"busy {most} %" if least == most else f"busy {least} to {most} %")
    known = sorted((rank.temp_c, rank.rank) for rank in ranks if rank.temp_c is not None)
    if known:
        (coolest_c, _), (hottest_c, hottest) = known[0], known[-1]
        least, most = f"{coolest_c:.0f}", f"{hottest_c:.0f}"
        between = f"{least} to {most} degrees C (hottest is rank {hottest})"
        parts.append(f"{most} degrees C" if least == most else between)
    throttled = [rank for rank in ranks if rank.held_back_by]
    if throttled:
        reasons = ", ".join(dict.fromkeys(rank.held_back_by for rank in throttled))
        parts.append(f"throttled: {name_ranks(throttled)} ({reasons})")
    return [ScreenLine("card", ", ".join(parts), "yellow" if throttled else "")] if parts else []


def _settled_odd(ranks: Sequence[RankEvidence]) -> OddRanks | None:
    """The ranks that the others wait for, once nothing has moved for a while."""
    still = [rank.still_s for rank in ranks if rank.still_s is not None and rank.msg != "end"]
    if not still or min(still) < _STILL_S:
        return None
    odd = find_odd(ranks, _SILENT_S)
    return odd if odd and odd.waiting else None


def _odd_text(odd: OddRanks) -> str:
    there, here = odd.waiting[0], odd.ranks[0]
    return (
        f"{name_ranks(odd.waiting)} in {there.phase} at step {there.step} for "
        f"{name_ranks(odd.ranks)} in {here.phase} at step {here.step}"
    )


def rank_table(report: RunReport) -> list[ScreenLine]:
    """One line a rank, in 80 columns where all of them run on one pod."""
    if not report.ranks:
        return []
    has_pods = any(rank.pod for rank in report.ranks)
    columns = [_COLUMNS[0], *([("POD", _POD_WIDTH)] if has_pods else []), *_COLUMNS[1:]]
    rows = [ScreenLine("", _line(columns, [heading for heading, _ in columns]), "bold")]
    note_of = _notes(report)
    for rank in report.ranks[:_MOST_LINES]:
        cells = [str(rank.rank), *([rank.pod[:_POD_WIDTH]] if has_pods else [])]
        note = note_of(rank)
        cells += [*_cells(rank, is_live=report.state in LIVE), note]
        style = "yellow" if note not in {"", _SLOWEST} else ""
        rows.append(ScreenLine("", _line(columns, cells), style))
    left_out = len(report.ranks) - _MOST_LINES
    if left_out > 0:
        rows.append(ScreenLine("", f"and {count_of(left_out, 'more rank')}: see `--json`"))
    return rows


def _cells(rank: RankEvidence, *, is_live: bool) -> list[str]:
    age_s = rank.beat_age_s if is_live else None
    return [
        rank.phase or "-",
        str(rank.step) if rank.msg is not None else "-",
        _age(age_s) if age_s is not None else "-",
        format_seconds(rank.own_s) if rank.own_s is not None else "-",
        f"{rank.gpu_mem_peak:,}" if rank.gpu_mem_peak is not None else "-",
        f"{rank.host_rss_mib:,}" if rank.host_rss_mib is not None else "-",
        f"{rank.temp_c:.0f}" if rank.temp_c is not None else "-",
    ]


def _age(seconds: float) -> str:
    """In one unit: `8 s`, `16 min`, `5 h`."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def _line(columns: Sequence[tuple[str, int]], cells: Sequence[str]) -> str:
    """Cells beside each other: words to the left, numbers to the right."""
    to_left = {"RANK", "POD", "PHASE", "NOTE"}
    parts = [
        f"{cell:<{width}}" if heading in to_left else f"{cell:>{width}}"
        for (heading, width), cell in zip(columns, cells, strict=True)
    ]
    return "  ".join(parts).rstrip()


def _notes(report: RunReport) -> Callable[[RankEvidence], str]:
    """What there is to say about a rank in one word; what matters most comes first."""
    is_live = report.state in LIVE
    spread = rank_spread(report.ranks)
    odd = _settled_odd(report.ranks) if is_live else None
    awaited = {id(rank) for rank in odd.ranks} if odd else set()

    def note(rank: RankEvidence) -> str:
        words = (
            ("unusable", bool(rank.problem)),
            ("no beat", is_live and rank.msg is None),
            ("ended", is_live and rank.msg == "end"),
            ("silent", is_live and rank.is_silent(_SILENT_S)),
            ("odd", id(rank) in awaited),
            ("throttled", rank.held_back_by != ""),
            (_SLOWEST, spread is not None and rank is spread.slowest and spread.factor > 1),
        )
        return next((word for word, is_so in words if is_so), "")

    return note
