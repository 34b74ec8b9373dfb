"""What the runner does about ranks that outlive others, by a clock that a test turns."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity, catches, children_of, identify, state_of
from nsa_core.rundir.ranks import RankEnd, RankProcess, write_rank_end, write_rank_process
from nsa_core.train.stop import TERM_DEADLINE_S
from nsa_ops.pod.rank_watch import POLL_S, TOGETHER_S, TORCHRUN_S, RankWatch
from nsa_ops.pod.torchrun import MONITOR_S
from nsa_ops.pod.trainer_group import TrainerGroup

GONE = ProcessIdentity(pid=2**22 - 1, start_ticks=1, boot_id="another boot")


class FakeGroup(TrainerGroup):
    """Ranks that live and die as a test says: this process stands for one that lives."""

    def __init__(self, run: RunDir, living: set[int]) -> None:
        super().__init__(run, 1, GONE, range(2))
        self.__dict__.update(now_living=living, killed=[])

    def members(self) -> dict[int, ProcessIdentity]:
        here = identify(os.getpid())
        assert here is not None
        return {rank: here if rank in self.__dict__["now_living"] else GONE for rank in range(2)}

    def kill_ranks(self) -> list[int]:
        self.__dict__["killed"].append("ranks")
        return [1]

    def kill(self) -> list[int]:
        self.__dict__["killed"].append("all")
        return [1, 2]


def watched(tmp_path: Path) -> tuple[FakeGroup, RankWatch, list[str]]:
    group, said = FakeGroup(RunDir(tmp_path), {0, 1}), []
    return group, RankWatch(group, lambda why, _: said.append(why)), said


def leave(group: FakeGroup, rank: int, *, follows: bool) -> None:
    record = RankEnd(
        run_id="r", attempt=1, rank=rank, code=0, reason="", step=1, at=1.0, follows=follows
    )
    write_rank_end(group.run, record)


def test_all_is_gone_within_30_s_and_nothing_before_the_25_s_of_a_save() -> None:
    term_arrives_s = POLL_S + MONITOR_S
    assert TERM_DEADLINE_S + 1 + term_arrives_s < TOGETHER_S
    assert POLL_S + TOGETHER_S + TORCHRUN_S + POLL_S < 28  # and two seconds for the rest


def test_a_rank_that_outlives_a_killed_one_is_killed_and_then_torchrun(tmp_path: Path) -> None:
    group, watch, said = watched(tmp_path)
    watch.look(100.0, 0.0)
    group.now_living.discard(1)
    watch.look(100.1, 0.1)
    assert watch.seen.last_seen == {1: 100.0}
    watch.look(126.0, TOGETHER_S)
    assert group.killed == []
    watch.look(126.3, TOGETHER_S + 0.2)
    assert (group.killed, watch.seen.stuck) == (["ranks"], {0})
    assert said == ["rank 0 still ran 25.5 s after another one was gone"]
    group.now_living.clear()
    watch.look(127.0, TOGETHER_S + 1)
    assert group.killed == ["ranks"]
    watch.look(130.0, TOGETHER_S + TORCHRUN_S + 0.4)
    assert group.killed == ["ranks", "all"]


def test_a_rank_that_began_and_died_between_two_looks_is_missed_as_well(tmp_path: Path) -> None:
    group, watch, _ = watched(tmp_path)
    group.now_living.discard(1)
    watch.look(100.0, 0.0)
    watch.look(126.0, TOGETHER_S + 0.1)
    assert (group.killed, watch.seen.last_seen) == (["ranks"], {1: 100.0})


def test_a_rank_that_agreed_to_end_does_not_hurry_the_one_that_saves(tmp_path: Path) -> None:
    group, watch, _ = watched(tmp_path)
    watch.look(0.0, 0.0)
    leave(group, 1, follows=False)
    group.now_living.discard(1)
    watch.look(1.0, 1.0)
    watch.look(500.0, 500.0)
    assert group.killed == []


def test_a_rank_that_only_followed_starts_the_clock_as_well(tmp_path: Path) -> None:
    group, watch, _ = watched(tmp_path)
    watch.look(0.0, 0.0)
    leave(group, 1, follows=True)
    group.now_living.discard(1)
    watch.look(1.0, 1.0)
    watch.look(28.0, 28.0)
    assert group.killed == ["ranks"]


def test_a_torchrun_that_does_not_end_after_its_last_rank_is_ended(tmp_path: Path) -> None:
    group, watch, _ = watched(tmp_path)
    watch.look(0.0, 0.0)
    for rank in (0, 1):
        leave(group, rank, follows=False)
    group.now_living.clear()
    watch.look(1.0, 1.0)
    watch.look(60.0, 60.0)
    assert group.killed == []
    watch.look(62.0, 62.0)
    assert group.killed == ["all"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_rank_counts_as_alive_when_its_torchrun_is_gone_and_is_killed_with_it(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    identity = identify(sleeper.pid)
    assert identity is not None
    run = RunDir(tmp_path)
    record = RankProcess(
        run_id="r", attempt=1, rank=1, local_rank=1, num_ranks=2, process=identity,
        started_unix_s=1.0,
    )  # fmt: skip
    write_rank_process(run, record)
    group = TrainerGroup(run, 1, GONE, range(2))
    assert group.is_alive()
    assert not TrainerGroup(run, 2, GONE, range(2)).is_alive()
    before = identity.model_copy(update={"boot_id": "an earlier one"})
    write_rank_process(run, record.model_copy(update={"process": before}))
    assert group.members() == {}
    assert group.kill() == []
    write_rank_process(run, record)
    assert group.signal(10) == {}  # it has no handler, and would die of it
    assert group.kill() == [sleeper.pid]
    sleeper.wait(10)
    assert not group.is_alive()


def test_the_kernel_tells_state_children_and_handlers(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert identity is not None
    assert sleeper.pid in children_of(os.getpid())
    assert not catches(sleeper.pid, 10)
    sleeper.send_signal(19)
    end = time.monotonic() + 10
    while state_of(identity) != "T" and time.monotonic() < end:
        time.sleep(0.01)
    assert state_of(identity) == "T"
    assert state_of(GONE) == ""
