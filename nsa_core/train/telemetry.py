"""What an attempt reports while it runs: heartbeats, tables, TensorBoard, events and its log."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from nsa_core.env import RankEnvironment
from nsa_core.rundir.atomic import append_line, write_text
from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.events import record
from nsa_core.rundir.heartbeat import BeatFigures, Heartbeat, Message, Phase
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.disk import LossyWrites, RunLog
from nsa_core.train.group import RankGroup
from nsa_core.train.stop import SignalWatch
from nsa_core.train.tables import TRAINING_COLUMNS, VALIDATION_COLUMNS, CsvLog, TensorBoardLog

if TYPE_CHECKING:  # it takes seconds to load
    from nsa_core.evaluate.perplexity import Perplexity


class TrainerFigures(BeatFigures):
    """All figures that the trainer writes, also those that no reader needs to know.

    Attributes:
        gate_layers: Gate figures of each layer; those of the worst one have fields of their own.
    """

    selected_blocks: float | None = None
    free_block_share: float | None = None
    gate_layers: list[dict[str, Any]] | None = None
    checkpoint_step: int | None = None
    exit_code: int | None = None


class HeartbeatWriter:
    """heartbeat_rank{r}.jsonl of one attempt; safe to use from the loop and the thread.

    The thread proves that the process lives, the loop proves that it moves.

    Attributes:
        sample: Called by the thread after each beat; may be slow.
        phase_deadline_s: How long the phase may take.
        staging: What the data phase is doing; written in that phase only.
    """

    def __init__(self, run: RunDir, manifest: RunManifest, rank: int, writes: LossyWrites) -> None:
        self._path = run.heartbeat(rank)
        self._identity = {
            "run_id": manifest.run_id, "attempt": manifest.attempt, "rank": rank,
            "pid": os.getpid(),
        }  # fmt: skip
        self._writes = writes
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._alive_seq = 0
        self._progress_seq = 0
        self.sample: Callable[[], None] | None = None
        self.phase: Phase = "init"
        self.phase_deadline_s: float | None = None
        self.step = 0
        self.micro_step = 0
        self.staging = BeatFigures()

    def start(self, interval_s: float) -> None:
        """Begin the thread that moves `alive_seq` and writes a beat every interval."""
        self.write("boot")
        threading.Thread(
            target=self._beat, args=(interval_s,), name="heartbeat", daemon=True
        ).start()

    def stop(self) -> None:
        """End the thread; the loop may still write."""
        self._finished.set()

    def advance(self, *, step: int | None = None, micro_step: int = 0) -> None:
        """The loop moved; costs no write."""
        self._progress_seq += 1
        self.micro_step = micro_step
        if step is not None:
            self.step = step

    def enter(self, phase: Phase, deadline_s: float | None = None) -> None:
        """Change the phase; a phase that may last is written at once."""
        self.phase, self.phase_deadline_s = phase, deadline_s
        if phase not in ("train", "data_wait"):
            self.write("beat")

    @contextmanager
    def within(self, phase: Phase, deadline_s: float | None = None) -> Iterator[None]:
        """Be in `phase` during the body, then again in the phase before with its own deadline."""
        before = self.phase, self.phase_deadline_s
        self.enter(phase, deadline_s)
        try:
            yield
        finally:
            self.enter(*before)

    def write(self, msg: Message, figures: BeatFigures | None = None) -> None:
        """Write one line."""
        with self._lock:
            now = time.time()
            fields = dict(self.staging) if self.phase == "data" else {}
            fields |= {name: value for name, value in figures or () if value is not None}
            beat = Heartbeat(
                **self._identity,
                ts=now,
                iso=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
                msg=msg,
                phase=self.phase,
                phase_deadline_s=self.phase_deadline_s,
                alive_seq=self._alive_seq,
                progress_seq=self._progress_seq,
                step=self.step,
                micro_step=self.micro_step,
                **fields,
            )
            line = beat.model_dump_json(exclude_none=True)
            self._writes.attempt("a heartbeat", lambda: append_line(self._path, line))

    def _beat(self, interval_s: float) -> None:
        while not self._finished.wait(interval_s):
            self._alive_seq += 1
            self.write("beat")
            if self.sample is not None:
                self.sample()


def is_last_line_torn(path: Path) -> bool:
    """Whether a kill cut the last line of a file; the next append starts a new line."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # none yet; `clear_obstacles` reports one that cannot be read
        return False


def read_last_alive(run: RunDir) -> float | None:
    """Time of the newest heartbeat of rank 0."""
    beats = read_last_records(run.heartbeat(), Heartbeat).records
    return beats[-1].ts if beats else None


class Telemetry:
    """All that one rank of an attempt reports; a full disk costs it lines, not the run.

    Tables and TensorBoard are those of rank 0, events those of the first rank of each pod, and
    every rank has heartbeats.

    Attributes:
        validated_steps: Steps that have a row in val.csv, also of earlier attempts.
    """

    def __init__(
        self, run: RunDir, manifest: RunManifest, place: RankEnvironment | None = None
    ) -> None:
        self._run = run
        self._attempt = manifest.attempt
        self._place = place or RankEnvironment()
        rank = self._place.rank
        self.log = RunLog(run.log, prefix="" if self._place.is_leader else f"rank {rank}: ")
        self.writes = LossyWrites(self.log.report)
        self.beats = HeartbeatWriter(run, manifest, rank, self.writes)
        self._training = CsvLog(run.training_csv, TRAINING_COLUMNS)
        self._validation = CsvLog(run.validation_csv, VALIDATION_COLUMNS)
        self._board = TensorBoardLog(run.tensorboard, manifest.attempt, self.writes)
        self._use_board = manifest.config.telemetry.tensorboard
        self._rates: list[float] = []
        self.validated_steps: set[int] = set()

    @property
    def median_tokens_per_s(self) -> float | None:
        """Median rate of this attempt, compilation excluded."""
        return median(self._rates) if self._rates else None

    def event(self, kind: str, message: str, *, of_rank: bool = False, **facts: Any) -> None:
        """Record that something happened, and print it.

        What happens to every rank the first one of the pod says; `of_rank` happened to this alone.
        """
        if not (self._place.is_leader or of_rank):
            return
        self.log.report(f"{kind}: {message}")
        who = "" if self._place.is_leader else f"rank {self._place.rank}: "
        self.writes.attempt(
            "an event",
            lambda: record(
                self._run,
                kind=kind,
                by="trainer",
                attempt=self._attempt,
                message=f"{who}{message}",
                facts=facts,
            ),
        )

    def note_torn_line(self) -> None:
        """Record a heartbeat line that a kill had cut, before the first line of this attempt."""
        path = self._run.heartbeat(self._place.rank)
        if is_last_line_torn(path):
            why = f"the last line of {path.name} was cut and is skipped"
            self.event("torn_line", why, of_rank=True)

    def continue_from(self, step: int) -> None:
        """Repair the tables for a run that continues after `step`, and open TensorBoard there."""
        if not self._place.is_first:
            return
        for table in (self._training, self._validation):
            self._repair(table, step)
        if self._use_board:
            self._board.open(purge_step=step + 1)

    def _repair(self, table: CsvLog, step: int) -> None:
        name = table.path.name
        keep = self._run.replayed(max(1, self._attempt - 1), table.path)
        try:
            repair = table.repair(step, keep)
        except OSError as error:
            self.log.report(f"warning: {name} could not be repaired: {error}")
            return
        if table is self._validation:
            self.validated_steps = set(repair.steps)
        if repair.torn:
            self.event("torn_line", f"{len(repair.torn)} cut rows of {name} were taken out")
        if repair.replayed:
            rows = len(repair.replayed)
            self.event("rows_replayed", f"{rows} rows of {name} after step {step} are done again")

    def progress(self, step: int, figures: TrainerFigures) -> None:
        """One logged step: a row of training.csv, a heartbeat, a point of each curve."""
        self.beats.write("progress", figures)
        if not self._place.is_first:
            return
        if figures.tokens_per_s is not None:
            self._rates.append(figures.tokens_per_s)
        cells = {name: getattr(figures, name, None) for name in TRAINING_COLUMNS}
        cells |= {"step": step, "tokens": figures.tokens_seen, "attempt": self._attempt}
        self.writes.attempt("training.csv", lambda: self._training.append(cells))
        points = {k: v for k, v in cells.items() if k not in ("step", "attempt") and v is not None}
        self._board.scalars("train", points, step)

    def anomaly(self, step: int, fault: str, loss: float, grad_norm: float, skipped: int) -> None:
        """One skipped step."""
        self.event(
            "anomaly", f"step {step} was skipped: {fault}", loss=str(loss), grad_norm=str(grad_norm)
        )
        self.beats.write(
            "anomaly", BeatFigures(loss=loss, grad_norm=grad_norm, finite=False, skipped=skipped)
        )

    def mark_anomaly(self, rule: str) -> None:
        """Put the rule that ends the run into `.anomaly_type`."""
        self.writes.attempt(".anomaly_type", lambda: write_text(self._run.anomaly, rule + "\n"))

    def validation(self, step: int, found: "Perplexity") -> None:
        """One validation: a row of val.csv, a heartbeat, a point of each curve."""
        if not self._place.is_first:
            return
        self.validated_steps.add(step)
        loss, bits = found.loss, found.bits_per_byte
        cells = {
            "step": step, "val_loss": loss, "bits_per_byte": bits, "ppl": found.perplexity,
            "tokens": found.num_tokens, "bytes": found.num_bytes, "attempt": self._attempt,
        }  # fmt: skip
        self.writes.attempt("val.csv", lambda: self._validation.append(cells))
        self.beats.write("eval", BeatFigures(val_loss=loss, bits_per_byte=bits))
        self._board.scalars("val", {"loss": loss, "bits_per_byte": bits}, step)
        self.log.report(f"validation at step {step}: loss {loss:.4f}, {bits:.4f} bits per byte")

    def close(self) -> None:
        """Flush TensorBoard and end the heartbeat thread."""
        self._board.close()
        self.beats.stop()


@dataclass(frozen=True)
class AttemptContext:
    """What an attempt has before torch is loaded."""

    run: RunDir
    manifest: RunManifest
    group: RankGroup
    telemetry: Telemetry
    signals: SignalWatch

    @property
    def beats(self) -> HeartbeatWriter:
        """The heartbeats of the attempt."""
        return self.telemetry.beats
