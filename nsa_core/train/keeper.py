"""When checkpoints are saved, which are kept, and whether a run without a new one may continue."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from nsa_core.config.base import one_line
from nsa_core.config.training import CheckpointConfig
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.checkpoint import (
    Checkpoint,
    list_checkpoints,
    plan_removal,
    read_known_good_name,
)
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint_files import (
    CheckpointOrigin,
    CheckpointWriteError,
    TrainingSnapshot,
    name_latest,
    write_checkpoint,
)
from nsa_core.train.failure import DiskFullError
from nsa_core.train.group import RankGroup
from nsa_core.train.sharded_save import SharedSave, write_sharded
from nsa_core.train.telemetry import Telemetry, TrainerFigures
from nsa_core.train.timing import GoodputClock

#: Folders that `set_aside_later` of resume.py has renamed.
_ASIDE = re.compile(r"aside_attempt\d+_step_(\d{6,})(?:_again)*")
#: Steps without an anomaly after a checkpoint that make it a known good one.
CLEAN_STEPS = 50
#: The run continues without a newer checkpoint for so many save intervals.
YOUNG_INTERVALS = 3


def find_known_good(
    saved_steps: Sequence[int], step: int, last_anomaly_step: int | None
) -> int | None:
    """The newest checkpoint with `CLEAN_STEPS` steps after it and no anomaly since; pure."""
    good = [
        saved
        for saved in saved_steps
        if step - saved >= CLEAN_STEPS and (last_anomaly_step is None or last_anomaly_step <= saved)
    ]
    return max(good, default=None)


def write_known_good(run: RunDir, step: int) -> None:
    """Name the last known good checkpoint, which a rollback goes to."""
    write_text(run.known_good, run.checkpoint(step).name + "\n")


def apply_retention(run: RunDir, config: CheckpointConfig, known_good: int | None) -> Iterator[int]:
    """Remove what `plan_removal` names; renamed first, so that none is ever half whole.

    Yields:
        The step of each one that has lost its name.
    """
    steps = [checkpoint.step for checkpoint in list_checkpoints(run)]
    protected = () if known_good is None else (known_good,)
    for step in plan_removal(
        steps, keep_last=config.keep_last, keep_every=config.keep_every, protected=protected
    ):
        folder = run.checkpoint(step)
        doomed = folder.with_name(f".writing_removed_{folder.name}")
        folder.rename(doomed)
        yield step
        shutil.rmtree(doomed)
    _remove_aside(run, known_good)


def _remove_aside(run: RunDir, known_good: int | None) -> None:
    """Remove checkpoints of an abandoned future, once a known good one has passed their step."""
    for folder in run.checkpoints.glob("aside_*"):
        step = _ASIDE.fullmatch(folder.name)
        if step and known_good is not None and int(step[1]) <= known_good:
            shutil.rmtree(folder)


@dataclass(frozen=True)
class SaveResult:
    """One save: the whole checkpoint or why there is none, and the seconds of writing it.

    Attributes:
        removed: Steps of the older checkpoints that it replaced.
    """

    step: int
    outcome: Checkpoint | CheckpointWriteError
    write_s: float
    removed: list[int]


@dataclass
class SaveStatistics:
    """Saves of this attempt; seconds."""

    num_saved: int = 0
    num_failed: int = 0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    write_s: float = 0.0


class CheckpointKeeper:
    """Saves checkpoints, at most one at a time, and knows which whole ones are on the disk.

    A save in the background waits for the one before, and that wait counts as stall. Every rank
    calls `save` after the same steps, because a snapshot is of all ranks; rank 0 writes it, or each
    rank its part.

    Attributes:
        begin_step: The step that this attempt began at.
        known_good: Step of the last known good checkpoint; None without one.
        whole_step: Newest step with a whole checkpoint of this run; None without one.
    """

    def __init__(
        self,
        run: RunDir,
        config: CheckpointConfig,
        origin: CheckpointOrigin,
        telemetry: Telemetry,
        clock: GoodputClock,
        group: RankGroup | None = None,
        *,
        rank_deadline_s: float = 120.0,
    ) -> None:
        self._group = group or RankGroup()
        self._run = run
        self._config = config
        self._origin = origin
        self._telemetry = telemetry
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._writing: Future[SaveResult] | None = None
        self._stall_s = 0.0
        self._num_begun = 0  # saves of this attempt; the same on every rank
        self._rank_deadline_s = rank_deadline_s
        self.known_good = self._read_known_good()
        self.statistics = SaveStatistics()
        self._saved_steps = [checkpoint.step for checkpoint in list_checkpoints(run)]
        self.last_anomaly_step: int | None = None
        self.whole_step: int | None = None
        self.begin_step = 0

    def _read_known_good(self) -> int | None:
        try:
            name = read_known_good_name(self._run)
        except (OSError, ValueError) as error:
            why = f"known_good cannot be read: {one_line(error)}; clean steps will name one again"
            self._telemetry.event("unreadable", why)
            return None
        found = [one.step for one in list_checkpoints(self._run) if one.path.name == name]
        return found[0] if found else None

    def begin_at(self, step: int, last_anomaly_step: int | None, *, is_own: bool) -> None:
        """The run continues from this step of its own or of another run; 0 is a fresh start."""
        self.begin_step = step
        kept = step if is_own else step - 1  # the rest is set aside, with the past that it is of
        self._saved_steps = [saved for saved in self._saved_steps if saved <= kept]
        if self.known_good is not None and self.known_good > kept:
            self.known_good = None
        self.last_anomaly_step = last_anomaly_step
        self.whole_step = step if is_own else None

    def is_due(self, step: int) -> bool:
        """Whether the schedule asks for a checkpoint after this step."""
        return self._config.save_every > 0 and step % self._config.save_every == 0

    def save(
        self, take: Callable[[], TrainingSnapshot | None], step: int, *, wait: bool = False
    ) -> None:
        """Take a snapshot and write it; in the background unless `wait`.

        Raises:
            DiskFullError: If the disk refuses and the run should not continue.
        """
        beats = self._telemetry.beats
        with beats.within("checkpoint"), self._clock.within("checkpoint_stall"):
            began = time.monotonic()
            self._wait_together()
            self.settle(wait=True)
            if self._group.as_first(claim=step != self.whole_step):
                snapshot = take()
                if snapshot is not None:
                    self._num_begun += 1
                    self._writing = self._writer.submit(self._write, snapshot)
                if not self._config.background:
                    self._wait_together()
                self._stall_s = time.monotonic() - began
            if wait:
                self.settle(wait=True, is_last=True)

    def _wait_together(self) -> None:
        """Wait until no rank writes any more, however long that takes.

        The ranks meet meanwhile, because one that waits in a single collective gives the others up.
        """
        while True:
            if self._writing is not None:
                meet_s = self._rank_deadline_s / 4 if self._group.size > 1 else None
                wait_for([self._writing], timeout=meet_s)
            is_busy = self._writing is not None and not self._writing.done()
            if self._group.add_up([is_busy]) == [0]:
                return

    def _write(self, snapshot: TrainingSnapshot) -> SaveResult:
        began = time.monotonic()
        outcome: Checkpoint | CheckpointWriteError
        try:
            if snapshot.layout is None:
                outcome = write_checkpoint(self._run, snapshot, self._origin)
            else:
                save = SharedSave(self._num_begun, self._rank_deadline_s)
                outcome = write_sharded(self._run, snapshot, self._origin, save)
        except CheckpointWriteError as error:
            outcome = error
        write_s = time.monotonic() - began
        removed: list[int] = []
        # removed in this thread, because to unlink large files takes a disk a while
        if isinstance(outcome, Checkpoint) and self._group.is_first:
            writes, final = self._telemetry.writes, outcome.path
            writes.attempt("latest", lambda: name_latest(self._run, final))
            writes.attempt(
                "retention",
                lambda: removed.extend(apply_retention(self._run, self._config, self.known_good)),
            )
        return SaveResult(snapshot.state.step, outcome, write_s, removed)

    def _collect(self, *, is_waited_for: bool) -> tuple[int, CheckpointWriteError] | None:
        """Take note of a save that has finished; of one that failed, the step and why, once."""
        writing = self._writing
        if writing is None or not (is_waited_for or writing.done()):
            return None
        self._writing = None
        result = writing.result()
        if isinstance(result.outcome, CheckpointWriteError):
            return result.step, result.outcome
        self._note_saved(result, result.outcome)
        return None

    def settle(self, *, wait: bool = False, is_last: bool = False) -> None:
        """Handle a finished write: retention and events, or whether the run may continue.

        Raises:
            DiskFullError: If the disk refused and the last whole checkpoint is too old.
        """
        failed = self._collect(is_waited_for=wait)
        if failed is not None:
            self._judge_failure(*failed, is_last=is_last)

    def drain(self) -> None:
        """Wait for a write under way at the end of an attempt; its failure is an event only."""
        failed = self._collect(is_waited_for=True)
        if failed is not None:
            self._telemetry.event("save_failed", str(failed[1]), step=failed[0])

    def mark_known_good(self, step: int) -> None:
        """Remember the newest checkpoint that clean steps have proven.

        While a write is under way it waits: the writer removes what is not known to be good.
        """
        if self._writing is not None or not self._group.is_first:
            return
        good = find_known_good(self._saved_steps, step, self.last_anomaly_step)
        if good is not None and good != self.known_good:
            self.known_good = good
            self._telemetry.writes.attempt("known_good", lambda: write_known_good(self._run, good))

    def find_good(self, first_bad_step: int) -> int | None:
        """The newest checkpoint that a bad step cannot have spoiled; None if there is none.

        That is the last known good one, or a later one from before the first bad step: one that
        was saved after a skipped step holds whatever led to it.
        """
        proven = [] if self.known_good is None else [self.known_good]
        before = [saved for saved in self._saved_steps if saved < first_bad_step]
        return max([*proven, *before], default=None)

    def _note_saved(self, result: SaveResult, checkpoint: Checkpoint) -> None:
        self.whole_step = result.step
        self._saved_steps.append(result.step)
        size = checkpoint.manifest.total_bytes
        self._saved_steps = [step for step in self._saved_steps if step not in result.removed]
        numbers = self.statistics
        numbers.num_saved += 1
        numbers.stall_s += self._stall_s
        numbers.longest_stall_s = max(numbers.longest_stall_s, self._stall_s)
        numbers.write_s += result.write_s
        self._telemetry.event(
            "saved",
            f"checkpoint of step {result.step}: {size:,} bytes, "
            f"the loop paused for {self._stall_s:.3f} s",
            step=result.step,
            path=str(checkpoint.path),
            bytes=size,
            stall_s=round(self._stall_s, 4),
            write_s=round(result.write_s, 4),
            removed=result.removed,
        )
        self._telemetry.beats.write("checkpoint", TrainerFigures(checkpoint_step=result.step))

    def _judge_failure(self, step: int, error: CheckpointWriteError, *, is_last: bool) -> None:
        self.statistics.num_failed += 1
        base = self.begin_step if self.whole_step is None else self.whole_step
        age = step - base
        limit = YOUNG_INTERVALS * self._config.save_every
        is_young = age <= limit or not limit  # without a schedule only a signal asked for this save
        # of several ranks the first one ends the run, unless all are at this place
        may_continue = not is_last and (is_young or not self._group.is_first)
        have = "none" if self.whole_step is None else f"step {self.whole_step}"
        self._telemetry.event(
            "save_failed",
            f"{error}; last whole checkpoint: {have}; the run "
            + ("continues" if may_continue else "stops")
            + (f" until it is {limit} steps old" if may_continue and limit else ""),
            step=step,
            is_disk_full=error.is_disk_full,
        )
        if not may_continue:
            message = f"{error}; the last whole checkpoint is {have}"
            raise DiskFullError(
                message,
                has_checkpoint=self.whole_step is not None,
                hint=f"{error.advice}, for the run directory, then `nsa-ops resume`",
            )
