"""Who runs and who watches a run: the records they leave, and the locks that keep them single."""

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import AttemptId
from nsa_core.rundir.process import (
    ProcessIdentity,
    boot_id,
    identify,
    is_alive,
    session_members,
)

Restarter = Literal["watchdog", "engine"]
_POLL_S = 0.1


class RunProcesses(TolerantModel):
    """Content of process.json: who holds the run, for as long as runner.lock is held.

    Attributes:
        runner: The process that waits for the trainer.
        trainer: The trainer, which leads a session of its own; None until it is started. Where
            this pod runs several ranks it is torchrun, and ranks.py has the ranks.
        first_rank: Number of the first rank of this pod.
        restarted_by: Who begins the next attempt: the watchdog, or the engine that runs this job.
        num_ranks: Ranks of this pod that torchrun has started; 0 where the trainer is one process.
    """

    schema_version: int = 1
    run_id: str
    attempt: int
    attempt_id: AttemptId = ""
    pod_id: str = ""
    runner: ProcessIdentity
    trainer: ProcessIdentity | None = None
    restarted_by: Restarter = "watchdog"
    first_rank: int = Field(0, ge=0)
    num_ranks: int = Field(0, ge=0, le=4096)
    module: str = "nsa_core.train"
    started_unix_s: float


def write_processes(run: RunDir, record: RunProcesses) -> None:
    """Write process.json whole."""
    write_text(run.process, record.model_dump_json(indent=2) + "\n")


def read_processes(run: RunDir, attempt: int | None = None) -> RunProcesses | None:
    """The recorded processes; None without a record, or if it is about another attempt."""
    try:
        record = read_model(RunProcesses, run.process)
    except (OSError, ValueError):
        return None
    return record if attempt in {None, record.attempt} else None


def is_running(identity: ProcessIdentity | None) -> bool | None:
    """Whether the recorded process lives; None if none was recorded."""
    return None if identity is None else is_alive(identity)


def is_this_boot(record: RunProcesses | None) -> bool:
    """Whether the recorded processes belong to this boot of the machine."""
    return record is None or record.runner.boot_id == boot_id()


def send(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal this very process; False if it does not run any more."""
    if not is_alive(identity):
        return False
    try:
        os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_session(leader: ProcessIdentity) -> list[int]:
    """KILL every process of the session that this process leads or led; their pids.

    A pid cannot be given to a new process while a session has it, so the members of the session
    are this run's unless the pid belongs to another process now; then nothing is signalled.
    """
    if leader.boot_id != boot_id() or (identify(leader.pid) and not is_alive(leader)):
        return []
    killed = []
    for pid in session_members(leader.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed.append(pid)
    return killed


_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a process whose parent has died becomes a child of this one."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class LockHeldError(RuntimeError):
    """Another process holds the lock."""


def take_lock(path: Path, *, wait_s: float = 0.0) -> int:
    """Take an exclusive lock on a file and return its descriptor; it holds until that is closed.

    A child that inherits the descriptor holds the lock too, for as long as it lives.

    Raises:
        LockHeldError: If another process still holds it then.
        OSError: If the file system cannot lock.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return _try_lock(path)
        except LockHeldError:
            if time.monotonic() >= end:
                raise
        time.sleep(_POLL_S)


def _try_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            message = f"{path} is locked by another process"
            raise LockHeldError(message) from error
        raise
    return descriptor


@contextmanager
def hold_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the lock of a file for the length of a block; see `take_lock`."""
    descriptor = take_lock(path, wait_s=wait_s)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
