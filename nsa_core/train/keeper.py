"""When checkpoints are saved and kept, and what a disk that refuses them means for the run."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nsa_core.config.base import one_line
from nsa_core.config.training import CheckpointConfig
from nsa_core.rundir.checkpoint import Checkpoint, list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint import CheckpointWriteError, Snapshot
from nsa_core.train.failure import DiskFullError
from nsa_core.train.goodput import GoodputClock
from nsa_core.train.retention import (
    apply_retention,
    find_known_good,
    read_known_good,
    write_known_good,
)
from nsa_core.train.saver import CheckpointSaver, SaveResult
from nsa_core.train.telemetry import Telemetry

#: A checkpoint is young enough to go on without a newer one for so many save intervals.
YOUNG_INTERVALS = 3


@dataclass
class SaveStatistics:
    """Saves of this attempt; seconds."""

    num_saved: int = 0
    num_failed: int = 0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    write_s: float = 0.0


class CheckpointKeeper:
    """Saves through a `CheckpointSaver` and answers for what is on the disk."""

    def __init__(
        self,
        run: RunDir,
        config: CheckpointConfig,
        saver: CheckpointSaver,
        telemetry: Telemetry,
        clock: GoodputClock,
    ) -> None:
        self._run = run
        self._config = config
        self._saver = saver
        self._telemetry = telemetry
        self._clock = clock
        self._stall_s = 0.0
        self._known_good = self._read_known_good()
        self.statistics = SaveStatistics()
        self._saved_steps = [checkpoint.step for checkpoint in list_checkpoints(run)]
        self.last_anomaly_step: int | None = None
        self.whole_step: int | None = None
        self.begin_step = 0

    def _read_known_good(self) -> int | None:
        try:
            return read_known_good(self._run)
        except (OSError, ValueError) as error:
            why = f"known_good cannot be read: {one_line(error)}; clean steps will name one again"
            self._telemetry.event("unreadable", why)
            return None

    def begin_at(self, step: int, last_anomaly_step: int | None, *, is_own: bool) -> None:
        """The run goes on from this step of its own or of another run; 0 is a fresh start."""
        self.begin_step = step
        self._saved_steps = [saved for saved in self._saved_steps if saved <= step]
        if self._known_good is not None and self._known_good > step:
            self._known_good = None  # set aside, with the future that was abandoned
        self.last_anomaly_step = last_anomaly_step
        self.whole_step = step if is_own else None

    def is_due(self, step: int) -> bool:
        """Whether the schedule asks for a checkpoint after this step."""
        return self._config.save_every > 0 and step % self._config.save_every == 0

    def save(self, take: Callable[[], Snapshot], step: int, *, wait: bool = False) -> None:
        """Take a snapshot and write it; in the background unless `wait`.

        Raises:
            DiskFullError: If the disk refuses and the run should not go on.
        """
        beats = self._telemetry.beats
        with beats.within("checkpoint"), self._clock.within("checkpoint_stall"):
            began = time.monotonic()
            self.settle(wait=True)
            if step != self.whole_step:
                self._saver.submit(take())
                self._stall_s = time.monotonic() - began
            if wait:
                self.settle(wait=True, is_last=True)

    def settle(self, *, wait: bool = False, is_last: bool = False) -> None:
        """Take note of a finished write: retention and events, or the question of going on.

        Raises:
            DiskFullError: If the disk refused and the last whole checkpoint is too old.
        """
        result = self._saver.collect(wait=wait)
        if result is None:
            return
        if isinstance(result.outcome, Checkpoint):
            self._note_saved(result, result.outcome)
        else:
            self._judge_failure(result, result.outcome, is_last=is_last)

    def drain(self) -> None:
        """Wait for a write under way at the end of an attempt; its failure ends nothing more."""
        result = self._saver.collect(wait=True)
        if result is None:
            return
        if isinstance(result.outcome, Checkpoint):
            self._note_saved(result, result.outcome)
        else:
            self._telemetry.event("save_failed", str(result.outcome), step=result.step)

    def mark_known_good(self, step: int) -> None:
        """Remember the newest checkpoint that clean steps have proven."""
        good = find_known_good(self._saved_steps, step, self.last_anomaly_step)
        if good is not None and good != self._known_good:
            self._known_good = good
            self._telemetry.writes.attempt("known_good", lambda: write_known_good(self._run, good))

    @property
    def known_good(self) -> int | None:
        """Step of the last known good checkpoint."""
        return self._known_good

    def find_good(self, first_bad_step: int) -> int | None:
        """The newest checkpoint that a bad step cannot have spoiled; None if there is none.

        That is the last known good one, or a later one from before the first bad step: one that
        was saved after a skipped step holds whatever led to it.
        """
        proven = [] if self._known_good is None else [self._known_good]
        before = [saved for saved in self._saved_steps if saved < first_bad_step]
        return max([*proven, *before], default=None)

    def _note_saved(self, result: SaveResult, checkpoint: Checkpoint) -> None:
        self.whole_step = result.step
        self._saved_steps.append(result.step)
        size = checkpoint.manifest.total_bytes
        removed: list[int] = []
        self._telemetry.writes.attempt(
            "retention",
            lambda: removed.extend(apply_retention(self._run, self._config, self._known_good)),
        )
        self._saved_steps = [step for step in self._saved_steps if step not in removed]
        numbers = self.statistics
        numbers.num_saved += 1
        numbers.stall_s += self._stall_s
        numbers.longest_stall_s = max(numbers.longest_stall_s, self._stall_s)
        numbers.write_s += result.write_s
        self._telemetry.event(
            "saved",
            f"checkpoint of step {result.step}: {size:,} bytes, "
            f"the loop stood still for {self._stall_s:.3f} s",
            step=result.step,
            path=str(checkpoint.path),
            bytes=size,
            stall_s=round(self._stall_s, 4),
            write_s=round(result.write_s, 4),
            removed=removed,
        )
        self._telemetry.beats.write("checkpoint", checkpoint_step=result.step)

    def _judge_failure(
        self, result: SaveResult, error: CheckpointWriteError, *, is_last: bool
    ) -> None:
        self.statistics.num_failed += 1
        base = self.begin_step if self.whole_step is None else self.whole_step
        age = result.step - base
        limit = YOUNG_INTERVALS * self._config.save_every
        goes_on = not is_last and age <= limit
        have = "none" if self.whole_step is None else f"step {self.whole_step}"
        self._telemetry.event(
            "save_failed",
            f"{error}; last whole checkpoint: {have}; "
            + (f"the run goes on until it is {limit} steps old" if goes_on else "the run stops"),
            step=result.step,
            is_disk_full=error.is_disk_full,
        )
        if not goes_on:
            message = f"{error}; the last whole checkpoint is {have}"
            raise DiskFullError(
                message,
                has_checkpoint=self.whole_step is not None,
                hint=f"{error.advice}, for the run directory, then `nsa-ops resume`",
            )
