"""Start the watchdog of a run again when it has died: the runner does, while its trainer runs.

The lock of the watchdog keeps it single: one too many ends at once.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from nsa_core.env import compiler_caches, trainer_environment
from nsa_core.rundir import events
from nsa_core.rundir.atomic import clear_obstacles
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.goodput import record_hang
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.process import identify
from nsa_ops.pod.ending import count_memory_kills, write_missing_exit
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import (
    LockHeldError,
    RunProcesses,
    is_running,
    kill_session,
    read_processes,
    take_lock,
    write_processes,
)
from nsa_ops.quantities import count_of

LOOK_S = 30.0
#: A watchdog that dies again and again has a reason that another start does not change.
MAX_STARTS = 3
Start = Callable[[RunDir, str], object]
TRAINER_MODULE = "nsa_core.train"
CONFLICT = 7
NOT_A_RUN = 6
LOCAL_RESOURCE = 11


def start_part(
    part: Literal["runner", "watchdog"], run: RunDir, module: str
) -> "subprocess.Popen[bytes]":
    """Start the runner or the watchdog of a run in a session of its own."""
    with run.watchdog_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"nsa_ops.pod.{part}", "--run-dir", str(run.root),
             "--module", module],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def start_watchdog(run: RunDir, module: str) -> "subprocess.Popen[bytes]":
    """Start the watchdog of a run, as `start_part`."""
    return start_part("watchdog", run, module)


class WatchdogKeeper:
    """Looks after the watchdog of one attempt from a thread, until it is stopped."""

    def __init__(
        self, run: RunDir, attempt: int, module: str, start: Start = start_watchdog
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._module = module
        self._start = start
        self._num_starts = 0
        self._started: list[object] = []  # kept: one that is forgotten while it runs is warned of
        self._is_over = threading.Event()

    def begin(self) -> None:
        """Look every `LOOK_S` seconds from now on."""
        threading.Thread(target=self._keep, name="keep-watched", daemon=True).start()

    def stop(self) -> None:
        """The attempt ends: start no more watchdogs."""
        self._is_over.set()

    def _keep(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Start the watchdog if the one that the run had is dead; each start is an event.

        A run that never had one, or whose watchdog is done, is left alone.
        """
        watchdog = read_watchdog(self._run)
        if watchdog is None or watchdog.doing == "done" or is_running(watchdog.identity):
            return
        if self._num_starts == MAX_STARTS:
            return
        self._num_starts += 1
        which = f"start {self._num_starts} of {MAX_STARTS}"
        why = f"the watchdog, pid {watchdog.identity.pid}, is dead: {which} by the runner"
        try:
            events.record(
                self._run, kind="watchdog_started", by="runner", attempt=self._attempt, message=why
            )
            self._started.append(self._start(self._run, self._module))
        except OSError as error:  # the next look tries again; it counts as a start
            sys.stderr.write(f"warning: {why}: {error}\n")


class RunnerRefusedError(RuntimeError):
    """The runner will not start a trainer; the code says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def claim(run: RunDir) -> tuple[int, RunManifest]:
    """Take the lock of the run and read what is to be run.

    Raises:
        RunnerRefusedError: If a trainer of this run lives, or the attempt has already ended.
    """
    try:
        manifest = read_manifest(run)
    except ManifestError as error:
        raise RunnerRefusedError(str(error), NOT_A_RUN) from error
    try:
        descriptor = take_lock(run.runner_lock)
    except LockHeldError as error:
        raise RunnerRefusedError(_describe_holder(run), CONFLICT) from error
    try:
        manifest = read_manifest(run)
        _refuse_if_used(run, manifest)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, manifest


def _describe_holder(run: RunDir) -> str:
    record = read_processes(run)
    who = "a runner or trainer"
    if record is not None and record.trainer is not None:
        who = f"trainer pid {record.trainer.pid} (attempt {record.attempt})"
    return f"{who} of run {run.run_id} is alive; halt it first: nsa-ops halt {run.run_id}"


def _refuse_if_used(run: RunDir, manifest: RunManifest) -> None:
    ended = read_exit(run)
    if ended is not None:
        message = (
            f"run {run.run_id} attempt {ended.attempt} has ended (code {ended.code}: "
            f"{ended.reason}); begin the next one: nsa-ops resume {run.run_id}"
        )
        raise RunnerRefusedError(message, CONFLICT)
    record = read_processes(run, manifest.attempt)
    if record is None:
        return
    if is_running(record.trainer):
        raise RunnerRefusedError(_describe_holder(run), CONFLICT)
    if record.trainer is not None:
        message = (
            f"run {run.run_id} attempt {manifest.attempt} was started before and left no exit "
            f"record; begin the next one: nsa-ops resume {run.run_id}"
        )
        raise RunnerRefusedError(message, CONFLICT)


def start_trainer(
    run: RunDir, manifest: RunManifest, lock: int, module: str
) -> subprocess.Popen[bytes]:
    """Start the trainer in its own session, recorded in process.json before its first instruction.

    The record is written between fork and exec by the child itself, whose pid and start time stay
    the same across exec: there is no moment at which a trainer runs unrecorded.
    """
    runner = identify(os.getpid())
    if runner is None:
        message = "/proc does not show this process; nsa-ops needs a Linux pod with /proc"
        raise RunnerRefusedError(message, LOCAL_RESOURCE)
    record = RunProcesses(
        run_id=manifest.run_id, attempt=manifest.attempt, attempt_id=manifest.attempt_id,
        pod_id=manifest.pod_id, runner=runner, module=module, started_unix_s=time.time(),
    )  # fmt: skip
    write_processes(run, record)

    def record_trainer() -> None:
        write_processes(run, record.model_copy(update={"trainer": identify(os.getpid())}))

    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, "--run-dir", str(run.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=record_trainer,  # noqa: PLW1509 -- the runner has one thread so far
            pass_fds=(lock,),
            env=trainer_environment(
                manifest.config.runtime.allocator, compiler_caches(run.pod_root, manifest.code_id)
            ),
        )


def forward_signals(
    run: RunDir, attempt: int, trainer: subprocess.Popen[bytes], keeper: WatchdogKeeper
) -> None:
    """Forward TERM to the trainer (the pod goes down), and INT as a stop that a person asked for.

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
        trainer.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)


def run_attempt(run: RunDir, module: str = TRAINER_MODULE) -> int:
    """Start the trainer of the current attempt, wait for it, and return its exit code."""
    lock, manifest = claim(run)
    for line in clear_obstacles(run):
        events.record(run, kind="unreadable", by="runner", attempt=manifest.attempt, message=line)
    memory_kills = count_memory_kills()
    trainer = start_trainer(run, manifest, lock, module)
    keeper = WatchdogKeeper(run, manifest.attempt, module)
    forward_signals(run, manifest.attempt, trainer, keeper)
    events.record(
        run, kind="started", by="runner", attempt=manifest.attempt,
        message=f"trainer pid {trainer.pid}, module {module}",
        facts={"pid": trainer.pid, "runner_pid": os.getpid()},
    )  # fmt: skip
    keeper.begin()
    code = trainer.wait()
    keeper.stop()
    _end_left_over(run, manifest.attempt)
    memory_kills = count_memory_kills() - memory_kills
    record = write_missing_exit(run, manifest, code, memory_kills)
    if not _has_recorded_its_end(run, manifest.attempt):
        events.record(
            run, kind="ended", by="runner", attempt=manifest.attempt,
            message=f"code {record.code}: {record.reason}",
            facts={"code": record.code, "process_code": code, "step": record.step},
        )  # fmt: skip
    with suppress(OSError):  # the next attempt counts it as well
        record_hang(run, record)
    os.close(lock)
    return code


def _has_recorded_its_end(run: RunDir, attempt: int) -> bool:
    """Whether the trainer recorded its end itself; one end is one event."""
    return any(event.attempt == attempt for event in events.find_events(run, "ended"))


def _end_left_over(run: RunDir, attempt: int) -> None:
    """KILL what the trainer left behind in its session: it would keep memory of the card."""
    record = read_processes(run, attempt)
    if record is None or record.trainer is None:
        return
    killed = kill_session(record.trainer)
    if killed:
        processes = count_of(len(killed), "process", "processes")
        events.record(
            run, kind="left_over_killed", by="runner", attempt=attempt,
            message=f"ended {processes} that the trainer had left behind",
            facts={"pids": killed},
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
    except RunnerRefusedError as refusal:
        sys.stderr.write(f"error: {refusal}\n")
        return refusal.code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or given.run_dir}: {error.strerror or error}\n")
        return LOCAL_RESOURCE
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
