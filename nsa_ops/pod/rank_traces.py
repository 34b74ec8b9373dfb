"""Read what the ranks of a pod have left of their attempt; rank_ending.py judges it."""

import os
from collections.abc import Iterable

from nsa_core.rundir.bounded_json import JsonError, open_regular, read_last_records
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.ranks import read_rank_end, read_rank_process
from nsa_ops.pod.rank_ending import RankTrace, parse_failures, parse_words
from nsa_ops.pod.rank_watch import RankSightings

_MOST_LOG_BYTES = 512 * 1024


def last_beat(run: RunDir, rank: int, attempt: int) -> Heartbeat | None:
    """The heartbeat of this attempt with the highest step; None without one."""
    beats = read_last_records(run.heartbeat(rank), Heartbeat).records
    own = (beat for beat in beats if beat.attempt == attempt)
    return max(own, key=lambda beat: (beat.step, beat.alive_seq), default=None)


def read_traces(
    run: RunDir, attempt: int, ranks: Iterable[int], seen: RankSightings, log_offset: int
) -> list[RankTrace]:
    """What is left of each of these ranks; training.log counts from the offset."""
    log = _read_log(run, log_offset)
    failures = parse_failures(log)
    traces = []
    for rank in ranks:
        record, beat = read_rank_process(run, rank, attempt), last_beat(run, rank, attempt)
        pid, failure = record.process.pid if record else None, failures.get(rank)
        if failure is not None and pid not in {None, failure.pid}:  # of an earlier attempt
            failure = None
        trace = RankTrace(
            rank=rank,
            pid=pid if pid is not None or failure is None else failure.pid,
            end=read_rank_end(run, rank, attempt),
            last_seen=seen.last_seen.get(rank),
            code=failure.code if failure else None,
            is_first=failure is not None and failure.is_first,
            is_stuck=rank in seen.stuck,
            step=beat.step if beat else 0,
            phase=beat.phase if beat else "",
            words=parse_words(log, rank),
        )
        traces.append(trace)
    return traces


def _read_log(run: RunDir, offset: int) -> str:
    """The end of the log, of this attempt where its beginning is known."""
    try:
        with open_regular(run.log) as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(min(offset, size), size - _MOST_LOG_BYTES))
            return log.read(_MOST_LOG_BYTES).decode(errors="replace")
    except (OSError, JsonError):
        return ""
