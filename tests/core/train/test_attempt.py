"""Ends outside the loop: a forced end, and a disk that takes no byte at the start."""

import errno
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from nsa_core.env import RankEnvironment
from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import TrainerExit, read_exit
from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.rundir.process import identify
from nsa_core.rundir.ranks import RankProcess, read_rank_end, write_rank_process
from nsa_core.train import attempt, checkpoint_files
from nsa_core.train.attempt import TrainerAttempt
from nsa_core.train.disk import hold_reserve
from nsa_core.train.failure import AttemptEnd, DiskFullError, RankLostError, RunIsTakenError
from nsa_core.train.group import RankGroup
from nsa_core.train.joined_group import JoinedGroup


class EndedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def end(run, manifest, monkeypatch):
    """Ends attempt 1 as the signal thread does; gives the exit code and the record."""

    def leave(code):
        raise EndedError(int(code))

    monkeypatch.setattr(os, "_exit", leave)

    def act():
        with pytest.raises(EndedError) as ended:
            TrainerAttempt(run, manifest)._exit_now("no clean stop within 24 s of SIGTERM")
        return ended.value.args[0], read_exit(run)

    return act


def ask(run, **fields):
    given = {"run_id": "r1", "attempt": 1, "reason": "stall: nothing has moved", "at": 0.0}
    write_halt(run, HaltRequest(**{**given, **fields}))


def test_a_loop_that_the_watchdog_ended_because_it_stood_still_has_hung(run, end):
    ask(run, by="watchdog", rule="stall")
    code, record = end()
    assert (code, record.code) == (16, 16)
    assert record.reason.startswith("hung (stall: nothing has moved); no clean stop")
    assert read_events(run)[-1].facts == {"code": 16}


@pytest.mark.parametrize(
    "fields",
    [
        {"by": "operator"},
        {"by": "watchdog", "rule": "loss_nonfinite"},
        {"by": "watchdog", "rule": "stall", "attempt": 2},
    ],
)
def test_any_other_forced_end_is_a_stop_that_can_be_resumed(run, end, fields):
    ask(run, **fields)
    code, record = end()
    assert (code, record.code) == (75, 75)
    assert "nothing was saved at the stop" in record.reason


SAYS = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "right to write",
    errno.EIO: "the disk fails",
    errno.ENODEV: "Look at that path",
}


@pytest.mark.parametrize("number", SAYS)
def test_the_hint_at_the_start_fits_the_error_of_the_disk(run, manifest, monkeypatch, number):
    def refuse(_run):
        raise OSError(number, os.strerror(number), str(run.reserve))

    monkeypatch.setattr(attempt, "hold_reserve", refuse)
    signals = SimpleNamespace(install=lambda *_: None)
    with pytest.raises(DiskFullError) as refused:
        attempt.TrainerAttempt(run, manifest)._train(signals)
    assert SAYS[number] in refused.value.hint
    assert ("Free space" in refused.value.hint) == (number in {errno.ENOSPC, errno.EDQUOT})
    assert os.strerror(number) in str(refused.value)


def test_safetensors_hides_the_number_in_its_words():
    full = SafetensorError("Error while serializing: I/O error: No space (os error 28)")
    other = SafetensorError("I/O error: Read-only file system (os error 30)")
    assert (checkpoint_files.is_disk_full(full), checkpoint_files.is_disk_full(other)) == (
        True,
        False,
    )
    assert "read-only" in checkpoint_files.advise(other)


class Leaving(RankGroup):
    """Notes what a rank had on record while it waited for the others, which come or do not."""

    def __init__(self, run, place, *, come):
        super().__init__(place)
        self._run, self._come = run, come
        self.seen = None

    def leave(self, code, wait):
        self.seen = read_rank_end(self._run, self.place.rank, 1)
        return self._come


@pytest.mark.parametrize("come", [True, False])
def test_an_agreed_end_counts_once_every_rank_has_come_to_it(run, manifest, come):
    """Rank 0 may fail in the final model, while the others have nothing left to do."""
    place = RankEnvironment(rank=1, local_rank=1, world_size=2, local_size=2)
    made = TrainerAttempt(run, manifest, place)
    made._group = group = Leaving(run, place, come=come)
    code = made._end(AttemptEnd(TrainerExit.FINISHED, "finished 6 steps", is_shared=True))
    ended = read_rank_end(run, 1, 1)
    assert group.seen.follows
    assert (code, ended.code) == ((0, 0) if come else (1, 1))
    assert ended.follows is not come
    assert "finished 6 steps" in ended.reason


SECOND = RankEnvironment(rank=1, local_rank=1, world_size=2, local_size=2)


def record_rank(run, rank, pid, attempt=1):
    """Record a process as a rank; one of this trainer has the same parent as this process."""
    record = RankProcess(
        run_id="r1", attempt=attempt, rank=rank, local_rank=rank, num_ranks=2,
        process=identify(pid), started_unix_s=time.time(),
    )  # fmt: skip
    write_rank_process(run, record)


@pytest.fixture
def other_trainer():
    """Pid of a process that has another parent than this one."""
    with subprocess.Popen(["sleep", "300"]) as child:
        yield child.pid
        child.kill()


def test_a_rank_follows_the_first_one_of_its_own_trainer(run, manifest):
    record_rank(run, 0, os.getpid())
    record_rank(run, 1, os.getpid(), attempt=2)
    assert attempt.take_run(run, SECOND) == manifest


def test_a_rank_of_the_second_pod_follows_the_first_one_of_that_pod(run, manifest, monkeypatch):
    monkeypatch.setattr(attempt, "LEADER_S", 0.1)
    place = RankEnvironment(rank=3, local_rank=1, world_size=4, local_size=2)
    record_rank(run, 0, os.getpid())
    with pytest.raises(RankLostError, match="rank 2 did not take the run"):
        attempt.take_run(run, place)
    record_rank(run, 2, os.getpid())
    assert attempt.take_run(run, place) == manifest


def test_a_rank_waits_for_the_first_one_and_gives_up(run, manifest, monkeypatch):
    late = threading.Timer(0.2, record_rank, (run, 0, os.getpid()))
    late.start()
    assert attempt.take_run(run, SECOND) == manifest
    late.join()
    run.rank_process(0).unlink()
    monkeypatch.setattr(attempt, "LEADER_S", 0.1)
    with pytest.raises(RankLostError, match=r"rank 0 did not take the run within 0\.1 s"):
        attempt.take_run(run, SECOND)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_second_trainer_leaves_without_a_trace(run, manifest, other_trainer, rank):
    """Seen before: it took the place of a rank that was late, and both trainers ended."""
    record_rank(run, 0, os.getpid())
    record_rank(run, rank, other_trainer)
    before = {path.name: path.read_bytes() for path in run.root.iterdir()}
    with pytest.raises(RunIsTakenError, match=f"rank {rank} is pid {other_trainer}"):
        attempt.take_run(run, SECOND)
    assert {path.name: path.read_bytes() for path in run.root.iterdir()} == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_end_of_a_rank_finds_room_on_a_full_disk(run, manifest, monkeypatch, is_shared, rank):
    """Without its own record it would count as killed, and the run would be started again."""

    def needs_room(run_dir, record):
        assert not run.reserve.exists()
        given(run_dir, record)

    given = attempt.write_rank_end
    monkeypatch.setattr(attempt, "write_rank_end", needs_room)
    hold_reserve(run)
    made = TrainerAttempt(
        run, manifest, RankEnvironment(rank=rank, local_rank=rank, world_size=2, local_size=2)
    )
    made._end(AttemptEnd(TrainerExit.DO_NOT_RESTART, "the disk is full", is_shared=is_shared))


def test_an_agreed_end_stands_though_the_links_cannot_be_closed(monkeypatch):
    """Every other rank has ended so by then, and this one would leave no record."""

    def fail():
        message = "NCCL communicator was aborted"
        raise RuntimeError(message)

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    group = JoinedGroup.__new__(JoinedGroup)
    RankGroup.__init__(group)
    group._store = dist.HashStore()
    assert group.leave(0, lambda: True)


def ask_to_pin():
    """As torch 2.11 says it on an H200 whose host has no memory left to pin."""
    message = (
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    )
    raise torch.AcceleratorError(message)


@pytest.mark.parametrize(
    "ask",
    [lambda: torch.empty(2**50, dtype=torch.uint8), lambda: bytearray(2**60), ask_to_pin],
    ids=["torch", "Python", "pinned"],
)
def test_a_host_without_memory_is_out_of_memory_and_no_bug(run, manifest, monkeypatch, ask):
    made = TrainerAttempt(run, manifest)
    monkeypatch.setattr(made, "_train", lambda signals: ask())
    assert made.run() == TrainerExit.OUT_OF_MEMORY
    record = read_exit(run)
    assert (record.code, record.reason.split(": ")[0]) == (13, "out of memory")
