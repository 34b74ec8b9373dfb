"""Which rank differs from the others while nothing moves."""

import os
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_ops.pod.stacks import (
    FlightRecord,
    SilentRank,
    StackGroup,
    explain_silence,
    find_odd,
    list_flight_records,
)


def group(*ranks: int) -> StackGroup:
    return StackGroup(ranks=list(ranks), text=str(ranks))


@pytest.mark.parametrize(
    ("groups", "silent", "said"),
    [
        ([group(0)], [], ""),
        ([group(0, 1)], [], ""),
        ([group(0), group(1)], [], ""),
        ([group(2), group(0, 1, 3)], [], "rank 2 is at another place than the other 3"),
        ([group(0)], [SilentRank(rank=1, why="is stopped")], "rank 1 is stopped"),
        ([], [SilentRank(rank=0, why="is stopped")], ""),
    ],
)
def test_the_odd_rank_is_named_where_one_is_odd(groups, silent, said: str) -> None:
    assert find_odd(groups, silent) == said


@pytest.mark.parametrize(
    ("state", "catches_it", "said"),
    [
        ("T", True, "is stopped (SIGSTOP)"),
        ("D", True, "waits in the kernel"),
        ("S", False, "takes no SIGUSR1 yet"),
        ("S", True, "wrote no stacks within 2 s"),
        ("", True, "is gone"),
    ],
)
def test_silence_is_explained_by_the_state_of_the_process(state, catches_it, said: str) -> None:
    assert explain_silence(state, catches_it=catches_it).startswith(said)


def test_the_dumps_of_the_flight_recorder_of_this_attempt_are_listed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.flight_record(0).write_bytes(b"old")
    os.utime(run.flight_record(0), (1.0, 1.0))
    run.flight_record(1).write_bytes(b"newer")
    assert list_flight_records(run, 100.0) == [
        FlightRecord(name="flight_recorder_rank1", size_bytes=5)
    ]
