"""The outermost edge of the trainer: take the run, turn every end into an exit code and a line."""

import fcntl
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nsa_core.collector import collect_nothing
from nsa_core.config.base import disk_advice, one_line
from nsa_core.env import RankEnvironment, read_rank
from nsa_core.rundir.atomic import clear_obstacles
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.exit import HANG_RULES, ExitRecord, TrainerExit, read_exit, write_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.process import ProcessIdentity, identify, is_alive, parent_of
from nsa_core.rundir.ranks import (
    RankEnd,
    RankProcess,
    read_rank_process,
    write_rank_end,
    write_rank_process,
)
from nsa_core.train.disk import RunLog, hold_reserve, release_reserve
from nsa_core.train.failure import (
    AttemptEnd,
    DiskFullError,
    RankLostError,
    RunIsTakenError,
    TrainerConfigurationError,
    TrainerError,
)
from nsa_core.train.group import RankGroup
from nsa_core.train.stop import SignalWatch
from nsa_core.train.telemetry import AttemptContext, Telemetry, TrainerFigures, read_last_alive

#: Errors of the compiler of torch: it cannot compile this model on this machine.
COMPILER_MODULES = ("torch._inductor", "torch._dynamo")
#: Longest wait of a rank for the first one of its pod, which takes the run before it loads torch.
LEADER_S = 60.0
_POLL_S = 0.05


def run_attempt(folder: Path) -> int:
    """Run the attempt that a run directory's manifest describes; returns the exit code."""
    run, place = RunDir(folder.resolve()), read_rank()
    try:
        manifest = take_run(run, place)
    except TrainerError as error:
        RunLog(run.log if run.root.is_dir() else Path(os.devnull)).report(_line(error))
        return error.code
    return TrainerAttempt(run, manifest, place).run()


def take_run(run: RunDir, place: RankEnvironment | None = None) -> RunManifest:
    """Lock the run directory for this process and read what to run.

    The lock is on the folder itself and ends with the process, however it ends. Where a run has
    several ranks, the first one of a pod takes it.

    Raises:
        TrainerConfigurationError: If this is no run directory.
        RunIsTakenError: If another trainer holds it, or its attempt has ended.
    """
    try:
        manifest = read_manifest(run)
    except (ManifestError, OSError) as error:
        raise TrainerConfigurationError(
            one_line(error), hint="Launch with `nsa-ops launch`"
        ) from error
    if place is None or place.is_leader:
        _lock(run)
    else:
        _follow_leader(run, manifest, place)
    ended = read_exit(run)
    if ended is not None and ended.attempt == manifest.attempt:
        message = f"attempt {ended.attempt} has ended with code {ended.code}: {ended.reason}"
        raise RunIsTakenError(
            message, hint=f"Begin the next attempt with `nsa-ops resume {run.run_id}`"
        )
    return manifest


def _lock(run: RunDir) -> None:
    descriptor = os.open(run.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"another trainer runs in {run.root}"
        raise RunIsTakenError(message, hint=f"See `nsa-ops status {run.run_id}`") from error


def _follow_leader(run: RunDir, manifest: RunManifest, place: RankEnvironment) -> None:
    """Wait until the first rank of this pod holds the lock; refuse if that of another trainer does.

    torchrun is the parent of all ranks of its trainer. Until then nothing is written: of two
    trainers that start at once, a rank of the refused one may be faster than those of the other.
    """
    leader, end = place.local_ranks.start, time.monotonic() + LEADER_S
    while True:
        found = {rank: _living(run, rank, manifest.attempt) for rank in (leader, place.rank)}
        for rank, process in found.items():
            # One that has just ended has no parent any more, and is in nobody's way.
            if process is not None and parent_of(process.pid) not in {None, os.getppid()}:
                message = f"another trainer runs in {run.root}: rank {rank} is pid {process.pid}"
                raise RunIsTakenError(message, hint=f"See `nsa-ops status {run.run_id}`")
        if found[leader] is not None:
            return
        if time.monotonic() > end:
            message = f"rank {leader} did not take the run within {LEADER_S:g} s"
            raise RankLostError(message, hint="Look at that rank: it is gone, or hangs")
        time.sleep(_POLL_S)


def _living(run: RunDir, rank: int, attempt: int) -> ProcessIdentity | None:
    """The process of a rank that runs now."""
    found = read_rank_process(run, rank, attempt)
    return found.process if found is not None and is_alive(found.process) else None


def _line(error: TrainerError) -> str:
    return f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else "")


class TrainerAttempt:
    """One attempt in this process; its end is written exactly once.

    Of several ranks each writes its own end, and the first one of each pod that of the attempt, if
    all ended because they agreed to.
    """

    def __init__(
        self, run: RunDir, manifest: RunManifest, place: RankEnvironment | None = None
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._place = place or RankEnvironment()
        self._group = RankGroup(self._place)
        self._telemetry = Telemetry(run, manifest, self._place)
        self._log, self._beats = self._telemetry.log, self._telemetry.beats

    @property
    def _is_alone(self) -> bool:
        return self._place.world_size == 1

    def run(self) -> int:
        """Train, and write the end, whatever it is.

        Returns:
            The exit code of `TrainerExit`. Where several ranks have agreed to end it is 0, so that
            torchrun has nothing to report; exit.json has the code.
        """
        signals = SignalWatch(self._exit_now, find_lost=self._find_lost)
        end = self._guarded(lambda: self._train(signals))
        signals.disarm()
        return self._end(end)

    def _train(self, signals: SignalWatch) -> AttemptEnd:
        if self._place.is_leader:
            for line in clear_obstacles(self._run, self._place.rank):
                self._telemetry.event("unreadable", line)
            self._hold_reserve()
        signals.install(self._run, self._place.rank)  # first, because torch takes seconds to load
        if not self._is_alone:
            write_rank_process(self._run, self._describe())
        self._telemetry.note_torn_line()
        last_alive = read_last_alive(self._run)
        self._beats.start(self._manifest.config.telemetry.beat_interval_s)
        # imported here because it loads torch, which takes seconds, and its optimizers the compiler
        with collect_nothing():
            import torch._dynamo  # noqa: F401

            from nsa_core.train.joined_group import join_group
            from nsa_core.train.training_run import run_training

        self._group = join_group(self._manifest.config, self._place)
        context = AttemptContext(self._run, self._manifest, self._group, self._telemetry, signals)
        return replace(run_training(context, last_alive), is_shared=self._group.has_agreed)

    def _describe(self) -> RankProcess:
        identity = identify(os.getpid())
        if identity is None:
            message = "/proc does not show this process; the trainer needs Linux with /proc"
            raise TrainerConfigurationError(message)
        return RankProcess(
            run_id=self._manifest.run_id,
            attempt=self._manifest.attempt,
            rank=self._place.rank,
            local_rank=self._place.local_rank,
            num_ranks=self._place.world_size,
            process=identity,
            started_unix_s=time.time(),
        )

    def _find_lost(self) -> str:
        """Which rank of this pod is gone; empty if none is, or none is known."""
        for rank in self._place.local_ranks:
            found = read_rank_process(self._run, rank, self._manifest.attempt)
            if found is not None and not is_alive(found.process):
                return f"rank {rank} is gone"
        return ""

    def _hold_reserve(self) -> None:
        try:
            hold_reserve(self._run)
        except OSError as error:
            message = f"{self._run.root} takes no more bytes: {one_line(error)}"
            hint = f"{disk_advice(error)}, then `nsa-ops resume`"
            raise DiskFullError(message, has_checkpoint=False, hint=hint) from error

    def _release_reserve(self) -> None:
        """Make room for the records of an end: where one rank ends, its pod's others do as well."""
        self._telemetry.writes.attempt("the reserve", lambda: release_reserve(self._run))

    def _guarded(self, body: Callable[[], AttemptEnd]) -> AttemptEnd:
        try:
            return body()
        except TrainerError as error:
            self._report(error)
            return AttemptEnd(error.code, str(error), error.is_shared, error.follows)
        except Exception as error:  # noqa: BLE001 - the outermost edge: every end has a code
            return self._classify(error)

    def _report(self, error: TrainerError) -> None:
        """Say what is wrong; what all ranks raise, the first one of the pod says."""
        if self._place.is_leader or not error.is_shared:
            self._log.report(_line(error))

    def _classify(self, error: Exception) -> AttemptEnd:
        from nsa_core.data.reporting import DataError
        from nsa_core.train.checkpoint_files import is_disk_full
        from nsa_core.train.joined_group import is_lost_rank, lost_rank
        from nsa_core.train.training_run import is_out_of_memory

        if not self._is_alone and is_lost_rank(error):
            lost = lost_rank(error)
            self._report(lost)
            return AttemptEnd(lost.code, str(lost), follows=True)
        if isinstance(error, DataError):
            if self._place.is_leader or not self._group.has_agreed:
                self._log.report(f"error: {error.message}\nhint: {error.hint}")
            return AttemptEnd(TrainerExit.DATA, error.message, self._group.has_agreed)
        if isinstance(error, OSError) and is_disk_full(error):
            has_checkpoint = bool(list_checkpoints(self._run))
            full = DiskFullError(str(error), has_checkpoint=has_checkpoint, hint="Free space")
            self._report(full)
            return AttemptEnd(full.code, str(full))
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._log.keep("".join(traceback.format_exception(error)))
        if is_out_of_memory(error):
            return self._end_without_memory(reason)
        if type(error).__module__.startswith(COMPILER_MODULES):
            self._log.report(
                f"error: torch.compile failed here: {reason}\n"
                f"hint: Set runtime.compile=false; its output is in {self._run.log}"
            )
            return AttemptEnd(TrainerExit.CONFIGURATION, f"torch.compile failed here: {reason}")
        if isinstance(error, OSError) and error.errno is not None:
            hint = f"{disk_advice(error)}; the traceback is in {self._run.log}"
            self._log.report(f"error: the system failed: {one_line(error)}\nhint: {hint}")
            return AttemptEnd(TrainerExit.CRASHED, f"the system failed: {one_line(error)}")
        self._log.report(f"error: a bug: {reason}\nhint: The traceback is in {self._run.log}")
        return AttemptEnd(TrainerExit.CRASHED, reason)

    def _end_without_memory(self, reason: str) -> AttemptEnd:
        """Leave what filled the memory, and say which setting to change."""
        from nsa_core.train.memory_report import make_memory_report, write_memory_report

        report = make_memory_report(
            self._manifest.config,
            attempt=self._manifest.attempt,
            rank=self._place.rank,
            step=self._beats.step,
            phase=self._beats.phase,
            error=reason,
        )
        self._telemetry.writes.attempt(
            "the report of the memory", lambda: write_memory_report(self._run, report)
        )
        where = self._run.memory_report(report.attempt, report.rank).name
        self._log.report(
            f"error: out of memory: {reason}\nhint: {report.advice[0]}; {where} has the rest"
        )
        return AttemptEnd(TrainerExit.OUT_OF_MEMORY, f"out of memory: {reason}")

    def _end(self, end: AttemptEnd) -> int:
        """Write the end; returns the exit code of the process."""
        self._release_reserve()
        speaks = self._is_alone
        if end.is_shared and not self._is_alone:
            end, speaks = self._leave(end)
        if not self._is_alone:
            self._write_rank_end(end)
        code = end.code
        self._beats.write("end", TrainerFigures(exit_code=int(code)))
        self._telemetry.close()
        if speaks and self._place.is_leader:
            self._write_exit(code, end.reason)
            self._telemetry.event(
                "ended",
                f"exit code {int(code)}: {end.reason}",
                code=int(code),
                step=self._beats.step,
                telemetry_lines_lost=self._telemetry.writes.num_lost,
            )
        return 0 if speaks and not self._is_alone else int(code)

    def _leave(self, end: AttemptEnd) -> tuple[AttemptEnd, bool]:
        """The end that was agreed on, if all ranks come to it; until then the cause is elsewhere.

        One of them may still fail: rank 0 writes the last checkpoint and the final model alone.
        """
        self._write_rank_end(replace(end, follows=True))
        if self._group.leave(end.code, self._wait_for_others):
            return end, True
        reason = f"another rank failed while the run ended ({end.reason})"
        return AttemptEnd(TrainerExit.CRASHED, reason, follows=True), False

    def _wait_for_others(self) -> bool:
        """Whether ranks that have not ended yet may still do so."""
        self._beats.advance()
        return not self._find_lost()

    def _write_rank_end(self, end: AttemptEnd) -> None:
        record = RankEnd(
            run_id=self._manifest.run_id,
            attempt=self._manifest.attempt,
            rank=self._place.rank,
            code=int(end.code),
            reason=end.reason,
            step=self._beats.step,
            at=time.time(),
            follows=end.follows,
        )
        self._telemetry.writes.attempt(
            "the end of this rank", lambda: write_rank_end(self._run, record)
        )

    def _write_exit(self, code: TrainerExit, reason: str) -> None:
        saved = list_checkpoints(self._run)
        record = ExitRecord(
            run_id=self._manifest.run_id,
            attempt=self._manifest.attempt,
            code=int(code),
            reason=reason,
            step=self._beats.step,
            checkpoint_step=saved[0].step if saved else None,
            at=time.time(),
            by="trainer",
        )
        self._telemetry.writes.attempt("exit.json", lambda: write_exit(self._run, record))

    def _exit_now(self, why: str) -> None:
        """End from another thread while the loop may be blocked in C; nothing more is saved."""
        code, reason = self._forced_end(why)
        self._release_reserve()
        if self._is_alone:
            self._write_exit(code, reason)
            self._telemetry.event("ended", f"exit code {int(code)}: {reason}", code=int(code))
        else:
            self._write_rank_end(AttemptEnd(code, reason, follows=True))
        os._exit(code)

    def _forced_end(self, why: str) -> tuple[TrainerExit, str]:
        """The loop has hung if the watchdog asked it to stop because it made no progress."""
        run, manifest = self._run, self._manifest
        asked = read_halt(run, run_id=manifest.run_id, attempt=manifest.attempt)
        if asked is not None and asked.rule in HANG_RULES:
            return TrainerExit.HANG, f"hung ({asked.reason}); {why}; nothing was saved"
        return TrainerExit.RESUMABLE, f"{why}; nothing was saved at the stop"
