"""Read the heartbeats of the ranks that follow a pod's first one: bounded, and only their own."""

from collections.abc import Iterator
from dataclasses import dataclass

from nsa_core.config.training import MAX_RANKS
from nsa_core.rundir.bounded_json import JsonLines, read_last_records, read_records
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.pod.rank_figures import has_counts
from nsa_ops.quantities import count_of

#: Of all these files together so much of the past is read, and of each at most so much.
_HISTORY_BYTES, _HISTORY_OF_EACH = 2 * 2**20, 128 * 1024
#: What one look reads of the new lines of each.
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class RankLines:
    """New heartbeats of one rank.

    Attributes:
        problem: Why lines of its file cannot be used; empty if all can.
    """

    rank: int
    beats: list[Heartbeat]
    problem: str


class RankFiles:
    """The heartbeat files of the ranks of a pod, from the second one on, followed by offset."""

    def __init__(self, run: RunDir, manifest: RunManifest) -> None:
        """Nothing is read yet."""
        self._run = run
        self._run_id = manifest.run_id
        self.ranks = manifest.pod_ranks[1:MAX_RANKS]
        self._offsets: dict[int, int] = {}
        self._problems: dict[int, str] = {}

    def read(self) -> Iterator[RankLines]:
        """The newest part of the past at first, then what is new; one for each rank."""
        for rank in self.ranks:
            found = self._read(rank)
            lines = self._select(rank, found)
            self._offsets[rank] = found.offset
            yield lines

    def _read(self, rank: int) -> JsonLines[Heartbeat]:
        path, offset = self._run.heartbeat(rank), self._offsets.get(rank)
        if offset is None:
            window = min(_HISTORY_OF_EACH, _HISTORY_BYTES // len(self.ranks))
            return read_last_records(path, Heartbeat, window)
        return read_records(path, Heartbeat, offset, _CHUNK_BYTES)

    def _select(self, rank: int, found: JsonLines[Heartbeat]) -> RankLines:
        """Its own lines; a problem is repeated until one of them can be used."""
        usable = [beat for beat in found.records if is_of_rank(beat, rank, self._run_id)]
        problem = self._problem(rank, found, len(usable))
        if problem:
            self._problems[rank] = problem
        elif usable:
            self._problems.pop(rank, None)
        return RankLines(rank, usable, self._problems.get(rank, ""))

    def _problem(self, rank: int, found: JsonLines[Heartbeat], num_usable: int) -> str:
        path = self._run.heartbeat(rank)
        num_bad = found.torn + len(found.records) - num_usable
        if num_bad:
            lines = count_of(num_bad, "line")
            return f"{path.name} has {lines} that cannot be used as heartbeats of rank {rank}"
        is_unread = not found.problem and rank not in self._offsets and not found.records
        if is_unread and path.exists() and path.stat().st_size > 0:
            return f"{path.name} has no whole line"
        return found.problem


def is_of_rank(beat: Heartbeat, rank: int, run_id: str) -> bool:
    """Whether a line was written by this rank of this run, with numbers that can be counts."""
    return beat.rank == rank and beat.run_id == run_id and has_counts(beat)
