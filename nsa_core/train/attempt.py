"""The outermost edge of the trainer: take the run, turn every end into an exit code and a line."""

import fcntl
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from nsa_core.config.base import disk_advice, one_line
from nsa_core.env import read_rank
from nsa_core.rundir.atomic import clear_obstacles
from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.exit import HANG_RULES, ExitRecord, TrainerExit, read_exit, write_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.train.disk import RunLog, hold_reserve, release_reserve
from nsa_core.train.failure import (
    DiskFullError,
    RunIsTakenError,
    TrainerConfigurationError,
    TrainerError,
)
from nsa_core.train.stop import SignalWatch
from nsa_core.train.telemetry import AttemptContext, Telemetry, TrainerFigures, read_last_alive

#: Errors of the compiler of torch: it cannot compile this model on this machine.
COMPILER_MODULES = ("torch._inductor", "torch._dynamo")


def run_attempt(folder: Path) -> int:
    """Run the attempt that a run directory's manifest describes; returns the exit code."""
    run = RunDir(folder.resolve())
    try:
        manifest = take_run(run)
    except TrainerError as error:
        RunLog(run.log if run.root.is_dir() else Path(os.devnull)).report(_line(error))
        return error.code
    return TrainerAttempt(run, manifest).run()


def take_run(run: RunDir) -> RunManifest:
    """Lock the run directory for this process and read what to run.

    The lock is on the folder itself and ends with the process, however it ends.

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
    descriptor = os.open(run.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"another trainer runs in {run.root}"
        raise RunIsTakenError(message, hint=f"See `nsa-ops status {run.run_id}`") from error
    ended = read_exit(run)
    if ended is not None and ended.attempt == manifest.attempt:
        message = f"attempt {ended.attempt} has ended with code {ended.code}: {ended.reason}"
        raise RunIsTakenError(
            message, hint=f"Begin the next attempt with `nsa-ops resume {run.run_id}`"
        )
    return manifest


def _line(error: TrainerError) -> str:
    return f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else "")


class TrainerAttempt:
    """One attempt in this process; its end is written exactly once."""

    def __init__(self, run: RunDir, manifest: RunManifest) -> None:
        self._run = run
        self._manifest = manifest
        self._rank = read_rank()
        self._telemetry = Telemetry(run, manifest, self._rank.rank)
        self._log, self._beats = self._telemetry.log, self._telemetry.beats

    def run(self) -> int:
        """Train, and write the end, whatever it is; returns the exit code."""
        signals = SignalWatch(self._exit_now)
        code, reason = self._guarded(lambda: self._train(signals))
        signals.disarm()
        self._end(code, reason)
        return code

    def _train(self, signals: SignalWatch) -> tuple[TrainerExit, str]:
        for line in clear_obstacles(self._run, self._rank.rank):
            self._telemetry.event("unreadable", line)
        self._hold_reserve()
        signals.install(self._run, self._rank.rank)  # first, because torch takes seconds to load
        self._telemetry.note_torn_line(self._rank.rank)
        last_alive = read_last_alive(self._run)
        self._beats.start(self._manifest.config.telemetry.beat_interval_s)
        # imported here because it loads torch, which takes seconds
        from nsa_core.train.training_run import run_training

        context = AttemptContext(self._run, self._manifest, self._rank, self._telemetry, signals)
        end = run_training(context, last_alive)
        return end.code, end.reason

    def _hold_reserve(self) -> None:
        try:
            hold_reserve(self._run)
        except OSError as error:
            message = f"{self._run.root} takes no more bytes: {one_line(error)}"
            hint = f"{disk_advice(error)}, then `nsa-ops resume`"
            raise DiskFullError(message, has_checkpoint=False, hint=hint) from error

    def _guarded(self, body: Callable[[], tuple[TrainerExit, str]]) -> tuple[TrainerExit, str]:
        try:
            return body()
        except TrainerError as error:
            self._log.report(_line(error))
            return error.code, str(error)
        except Exception as error:  # noqa: BLE001 - the outermost edge: every end has a code
            return self._classify(error)

    def _classify(self, error: Exception) -> tuple[TrainerExit, str]:
        from nsa_core.data.reporting import DataError
        from nsa_core.train.checkpoint_files import is_disk_full
        from nsa_core.train.training_run import is_out_of_memory

        if isinstance(error, DataError):
            self._log.report(f"error: {error.message}\nhint: {error.hint}")
            return TrainerExit.DATA, error.message
        if isinstance(error, OSError) and is_disk_full(error):
            has_checkpoint = bool(list_checkpoints(self._run))
            full = DiskFullError(str(error), has_checkpoint=has_checkpoint, hint="Free space")
            self._log.report(_line(full))
            return full.code, str(full)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._log.keep("".join(traceback.format_exception(error)))
        if is_out_of_memory(error):
            hint = "Lower batch.micro_batch and raise batch.accumulation by as much"
            self._log.report(f"error: out of memory: {reason}\nhint: {hint}")
            return TrainerExit.OUT_OF_MEMORY, f"out of memory: {reason}"
        if type(error).__module__.startswith(COMPILER_MODULES):
            self._log.report(
                f"error: torch.compile failed here: {reason}\n"
                f"hint: Set runtime.compile=false; its output is in {self._run.log}"
            )
            return TrainerExit.CONFIGURATION, f"torch.compile failed here: {reason}"
        if isinstance(error, OSError) and error.errno is not None:
            hint = f"{disk_advice(error)}; the traceback is in {self._run.log}"
            self._log.report(f"error: the system failed: {one_line(error)}\nhint: {hint}")
            return TrainerExit.CRASHED, f"the system failed: {one_line(error)}"
        self._log.report(f"error: a bug: {reason}\nhint: The traceback is in {self._run.log}")
        return TrainerExit.CRASHED, reason

    def _end(self, code: TrainerExit, reason: str) -> None:
        self._beats.write("end", TrainerFigures(exit_code=int(code)))
        self._telemetry.close()
        self._telemetry.writes.attempt("the reserve", lambda: release_reserve(self._run))
        self._write_exit(code, reason)
        lost = self._telemetry.writes.num_lost
        facts = {"code": int(code), "step": self._beats.step, "telemetry_lines_lost": lost}
        self._telemetry.event("ended", f"exit code {int(code)}: {reason}", **facts)

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
        self._telemetry.writes.attempt("the reserve", lambda: release_reserve(self._run))
        self._write_exit(code, reason)
        self._telemetry.event("ended", f"exit code {int(code)}: {reason}", code=int(code))
        os._exit(code)

    def _forced_end(self, why: str) -> tuple[TrainerExit, str]:
        """The loop has hung if the watchdog asked it to stop because it made no progress."""
        run, manifest = self._run, self._manifest
        asked = read_halt(run, run_id=manifest.run_id, attempt=manifest.attempt)
        if asked is not None and asked.rule in HANG_RULES:
            return TrainerExit.HANG, f"hung ({asked.reason}); {why}; nothing was saved"
        return TrainerExit.RESUMABLE, f"{why}; nothing was saved at the stop"
