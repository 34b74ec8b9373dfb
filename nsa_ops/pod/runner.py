"""`python -m nsa_ops.pod.runner --run-dir D`: start the trainer of one attempt and wait for it.

A trainer of several ranks is torchrun. What it leaves behind is ended, and an end that the trainer
could not record is recorded here.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from nsa_core.env import compiler_caches, trainer_environment
from nsa_core.rundir import events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.goodput import record_hang
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.process import children_of, identify
from nsa_ops.pod.attempts import record_obstacles
from nsa_ops.pod.ending import ProcessEnd, count_memory_kills, write_missing_exit
from nsa_ops.pod.keep_watched import WatchdogKeeper
from nsa_ops.pod.messages import ReplyCode
from nsa_ops.pod.processes import (
    LockHeldError,
    Restarter,
    RunProcesses,
    adopt_orphans,
    kill_session,
    read_processes,
    take_lock,
    write_processes,
)
from nsa_ops.pod.rank_watch import RankSightings, RankWatch
from nsa_ops.pod.torchrun import find_missing_place, ranks_variables, trainer_command
from nsa_ops.pod.trainer_group import TrainerGroup, group_of, is_trainer_running
from nsa_ops.quantities import count_of

TRAINER_MODULE = "nsa_core.train"


class StartRefusedError(RuntimeError):
    """No trainer is started here; the code, which is final for an engine, says why."""

    def __init__(self, message: str, code: int, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def claim(run: RunDir) -> tuple[int, RunManifest]:
    """Take the lock of the run and read what is to be run.

    Raises:
        StartRefusedError: If a trainer of this run lives, or the attempt has already ended.
    """
    try:
        manifest = read_manifest(run)
    except ManifestError as error:
        raise StartRefusedError(str(error), ReplyCode.NOT_FOUND) from error
    try:
        descriptor = take_lock(run.runner_lock)
    except LockHeldError as error:
        raise StartRefusedError(_describe_holder(run), ReplyCode.CONFLICT) from error
    try:
        manifest = read_manifest(run)
        _refuse_if_used(run, manifest)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, manifest


def _describe_holder(run: RunDir) -> str:
    group = group_of(run, read_processes(run))
    who = "a runner or trainer" if group is None else group.survivors
    return f"run {run.run_id} is alive: {who}; halt it first: nsa-ops halt {run.run_id}"


def _refuse_if_used(run: RunDir, manifest: RunManifest) -> None:
    ended = read_exit(run)
    if ended is not None:
        message = (
            f"run {run.run_id} attempt {ended.attempt} has ended (code {ended.code}: "
            f"{ended.reason}); begin the next one: nsa-ops resume {run.run_id}"
        )
        raise StartRefusedError(message, ReplyCode.CONFLICT)
    record = read_processes(run, manifest.attempt)
    if record is None:
        return
    if is_trainer_running(run, record):
        raise StartRefusedError(_describe_holder(run), ReplyCode.CONFLICT)
    if record.trainer is not None:
        message = (
            f"run {run.run_id} attempt {manifest.attempt} was started before and left no exit "
            f"record; begin the next one: nsa-ops resume {run.run_id}"
        )
        raise StartRefusedError(message, ReplyCode.CONFLICT)


def start_trainer(
    run: RunDir, manifest: RunManifest, lock: int, module: str, restarted_by: Restarter = "watchdog"
) -> subprocess.Popen[bytes]:
    """Start the trainer in its own session, recorded in process.json before its first instruction.

    The record is written between fork and exec by the child itself, whose pid and start time stay
    the same across exec: there is no moment at which a trainer runs unrecorded.
    """
    runner = identify(os.getpid())
    if runner is None:
        message = "/proc does not show this process; nsa-ops needs a Linux pod with /proc"
        raise StartRefusedError(message, ReplyCode.LOCAL_RESOURCE)
    ranks = manifest.pod_ranks if manifest.config.num_ranks > 1 else range(0)
    record = RunProcesses(
        run_id=manifest.run_id, attempt=manifest.attempt, attempt_id=manifest.attempt_id,
        pod_id=manifest.pod_id, runner=runner, module=module, started_unix_s=time.time(),
        restarted_by=restarted_by,
        first_rank=manifest.pod_ranks.start, num_ranks=len(ranks),
    )  # fmt: skip
    write_processes(run, record)

    def record_trainer() -> None:
        write_processes(run, record.model_copy(update={"trainer": identify(os.getpid())}))

    environment = trainer_environment(
        manifest.config.runtime.allocator, compiler_caches(run.pod_root, manifest.code_id)
    )
    with run.log.open("ab") as log:
        return subprocess.Popen(
            trainer_command(run, manifest, module),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=record_trainer,  # noqa: PLW1509 -- the runner has one thread so far
            pass_fds=(lock,),
            env=environment | ranks_variables(run, manifest),
        )


def forward_signals(
    run: RunDir,
    attempt: int,
    trainer: subprocess.Popen[bytes],
    keeper: WatchdogKeeper,
    group: TrainerGroup | None,
    early: Sequence[signal.Signals] = (),
) -> None:
    """Forward TERM to the trainer (the pod goes down), and INT as a stop that a person asked for.

    `early` are signals by which an engine announces TERM; they are forwarded as TERM as well. Of a
    trainer with several ranks the ranks get it: torchrun would report a failure.
    HUP is ignored from the start: closing the terminal ends neither of the two.
    """

    def forward(number: int, _frame: object) -> None:
        keeper.stop()
        name = signal.Signals(number).name.removeprefix("SIG")
        events.record(
            run, kind="signal", by="runner", attempt=attempt,
            message=f"the runner got {name} and forwards TERM to pid {trainer.pid}",
            facts={"signal": name, "pid": trainer.pid},
        )  # fmt: skip
        if group is None or not group.has_ranks:
            trainer.send_signal(signal.SIGTERM)
        else:
            group.signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, *early):
        signal.signal(number, forward)


def run_attempt(
    run: RunDir,
    module: str = TRAINER_MODULE,
    *,
    restarted_by: Restarter = "watchdog",
    early: Sequence[signal.Signals] = (),
) -> int:
    """Start the trainer of the current attempt, wait for it, and return its exit code.

    `restarted_by` begins the next attempt, if anybody; `early` as in `forward_signals`.
    """
    lock, manifest = claim(run)
    if missing := find_missing_place(manifest):
        os.close(lock)
        message = f"{run.manifest}: {missing}"
        raise StartRefusedError(message, ReplyCode.USAGE)
    for rank in manifest.pod_ranks:
        record_obstacles(run, rank, attempt=manifest.attempt, by="runner")
    memory_kills = count_memory_kills()
    log_offset = run.log.stat().st_size if run.log.exists() else 0
    of_others = children_of(os.getpid())  # such as the watchdog of a node of a job
    trainer = start_trainer(run, manifest, lock, module, restarted_by)
    group = group_of(run, read_processes(run, manifest.attempt))
    keeper = WatchdogKeeper(run, manifest.attempt, module)
    forward_signals(run, manifest.attempt, trainer, keeper, group, early)
    events.record(
        run, kind="started", by="runner", attempt=manifest.attempt,
        message=f"trainer pid {trainer.pid}, module {module}{_describe_ranks(manifest)}",
        facts={"pid": trainer.pid, "runner_pid": os.getpid()},
    )  # fmt: skip
    keeper.begin()
    code, seen = _wait(run, manifest.attempt, trainer, group)
    keeper.stop()
    _end_left_over(run, manifest.attempt, group, {*of_others, *keeper.pids})
    memory_kills = count_memory_kills() - memory_kills
    process = ProcessEnd(code, memory_kills, seen, log_offset)
    record = write_missing_exit(run, manifest, process)
    if not _has_recorded_its_end(run, manifest.attempt):
        events.record(
            run, kind="ended", by="runner", attempt=manifest.attempt,
            message=f"code {record.code}: {record.reason}",
            facts={"code": record.code, "process_code": code, "step": record.step},
        )  # fmt: skip
    with suppress(OSError):  # the next attempt counts it as well
        record_hang(run, record)
    os.close(lock)
    return record.code if group is not None and group.has_ranks else code


def _describe_ranks(manifest: RunManifest) -> str:
    ranks, total = manifest.pod_ranks, manifest.config.num_ranks
    return f", ranks {ranks[0]} to {ranks[-1]} of {total}" if total > 1 else ""


def _wait(
    run: RunDir, attempt: int, trainer: "subprocess.Popen[bytes]", group: TrainerGroup | None
) -> tuple[int, RankSightings]:
    """The exit code of the trainer, and what was seen of its ranks."""
    if group is None or not group.has_ranks:
        return trainer.wait(), RankSightings()
    adopt_orphans()

    def report(why: str, killed: list[int]) -> None:
        _record_killed(run, attempt, killed, why)

    watch = RankWatch(group, report)
    code = watch.wait(trainer)
    shutil.rmtree(run.torchrun, ignore_errors=True)
    return code, watch.seen


def _has_recorded_its_end(run: RunDir, attempt: int) -> bool:
    """Whether the trainer recorded its end itself; one end is one event."""
    return any(event.attempt == attempt for event in events.find_events(run, "ended"))


def _end_left_over(
    run: RunDir, attempt: int, group: TrainerGroup | None, spared: Collection[int]
) -> None:
    """KILL what the trainer left behind in its sessions: it would keep memory of the card.

    Orphans of torchrun have become children of this process; `spared` are those that never were.
    """
    if group is None:
        return
    adopted = [pid for pid in children_of(os.getpid()) if pid not in spared]
    killed = group.kill()
    for leader in filter(None, map(identify, adopted if group.has_ranks else [])):
        killed += kill_session(leader)
    _record_killed(run, attempt, killed, "the trainer had left it behind")


def _record_killed(run: RunDir, attempt: int, killed: list[int], why: str) -> None:
    if killed:
        processes = count_of(len(killed), "process", "processes")
        events.record(
            run, kind="left_over_killed", by="runner", attempt=attempt,
            message=f"ended {processes}: {why}", facts={"pids": killed},
        )  # fmt: skip


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nsa_ops.pod.runner", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--module", default=TRAINER_MODULE, help="Python module that trains")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt; the exit code is the trainer's, 128 + n for signal n, or a refusal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = _parse(arguments)
    try:
        code = run_attempt(RunDir(given.run_dir.resolve()), given.module)
    except StartRefusedError as refusal:
        sys.stderr.write(f"error: {refusal}\n")
        return refusal.code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or given.run_dir}: {error.strerror or error}\n")
        return ReplyCode.LOCAL_RESOURCE
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
