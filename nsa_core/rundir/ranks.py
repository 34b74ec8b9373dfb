"""What each rank leaves in the run directory where a run has several: its process and its end.

Rank r writes process_rank{r}.json when it begins, and exit_rank{r}.json when it ends. An end that
all ranks agreed on is in exit.json as well, by rank 0. After any other end the runner makes
exit.json of these records, and names the rank that failed first.
"""

from pydantic import Field

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity


class RankProcess(TolerantModel):
    """Content of process_rank{r}.json: the process that a signal for this rank goes to."""

    run_id: str
    attempt: int
    rank: int
    local_rank: int
    num_ranks: int
    process: ProcessIdentity
    started_unix_s: float


class RankEnd(TolerantModel):
    """Content of exit_rank{r}.json.

    Attributes:
        code: Exit code of the trainer, of this rank alone.
        at: Unix seconds, by the clock of its pod.
        follows: It ended because another rank was gone, or a collective failed: the cause is
            elsewhere.
    """

    run_id: str
    attempt: int
    rank: int
    code: int = Field(ge=0, le=255)
    reason: str
    step: int = Field(ge=0, le=2**53)
    at: float = Field(allow_inf_nan=False)
    follows: bool = False


def write_rank_process(run: RunDir, record: RankProcess) -> None:
    """Write process_rank{r}.json whole."""
    write_text(run.rank_process(record.rank), record.model_dump_json(indent=2) + "\n")


def write_rank_end(run: RunDir, record: RankEnd) -> None:
    """Write exit_rank{r}.json whole."""
    write_text(run.rank_exit(record.rank), record.model_dump_json(indent=2) + "\n")


def read_rank_process(run: RunDir, rank: int, attempt: int) -> RankProcess | None:
    """The process of a rank of this attempt; None where none is recorded that can be used."""
    try:
        record = read_model(RankProcess, run.rank_process(rank))
    except (OSError, ValueError):
        return None
    return record if (record.attempt, record.rank) == (attempt, rank) else None


def read_rank_end(run: RunDir, rank: int, attempt: int) -> RankEnd | None:
    """How a rank of this attempt ended; None while it runs, or if it left no usable record."""
    try:
        record = read_model(RankEnd, run.rank_exit(rank))
    except (OSError, ValueError):
        return None
    return record if (record.attempt, record.rank) == (attempt, rank) else None
