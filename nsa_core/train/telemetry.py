"""Everything a run says about itself: heartbeats, tables, TensorBoard and events."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.events import record
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.csv_log import TRAINING_COLUMNS, VALIDATION_COLUMNS, CsvLog
from nsa_core.train.heartbeat import HeartbeatWriter, count_torn_lines
from nsa_core.train.log import RunLog
from nsa_core.train.tensorboard import TensorBoardLog


@dataclass(frozen=True)
class StepRecord:
    """What is logged of one step; names as in training.csv and `Heartbeat`.

    Attributes:
        extra: Further heartbeat fields: memory, gates, kernel paths, fetch percentiles.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float | None
    mfu: float | None
    step_s: float
    data_s: float
    skipped: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationRecord:
    """One validation; names as in val.csv."""

    step: int
    val_loss: float
    bits_per_byte: float
    ppl: float
    tokens: int
    bytes: int


class Telemetry:
    """The one door through which the loop says something; a full disk costs it lines, no more."""

    def __init__(
        self, run: RunDir, manifest: RunManifest, beats: HeartbeatWriter, log: RunLog
    ) -> None:
        self._run = run
        self._attempt = manifest.attempt
        self.beats = beats
        self.log = log
        self.writes = beats.writes
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

    def event(self, kind: str, message: str, **facts: Any) -> None:
        """Record that something happened, and say it."""
        self.log.tell(f"{kind}: {message}")
        self.writes.attempt(
            "an event",
            lambda: record(
                self._run,
                kind=kind,
                by="trainer",
                attempt=self._attempt,
                message=message,
                facts=facts,
            ),
        )

    def note_torn_lines(self, rank: int) -> None:
        """Record a heartbeat line that a kill had cut, before the first line of this attempt."""
        if count_torn_lines(self._run, rank):
            name = self._run.heartbeat(rank).name
            self.event("torn_line", f"the last line of {name} was cut and is passed over")

    def continue_from(self, step: int) -> None:
        """Repair the tables for a run that goes on after `step`, and open TensorBoard there."""
        before = max(1, self._attempt - 1)
        for table, path in (
            (self._training, self._run.training_csv),
            (self._validation, self._run.validation_csv),
        ):
            self._repair(table, path.name, step, self._run.replayed(before, path))
        if self._use_board:
            self._board.open(purge_step=step + 1)

    def _repair(self, table: CsvLog, name: str, step: int, keep: Path) -> None:
        try:
            repair = table.repair(step, keep)
        except OSError as error:
            self.log.tell(f"warning: {name} could not be repaired: {error}")
            return
        if table is self._validation:
            self.validated_steps = set(repair.steps)
        if repair.torn:
            self.event("torn_line", f"{len(repair.torn)} cut rows of {name} were taken out")
        if repair.replayed:
            rows = len(repair.replayed)
            self.event("rows_replayed", f"{rows} rows of {name} after step {step} are done again")

    def progress(self, row: StepRecord) -> None:
        """One logged step."""
        if row.tokens_per_s is not None:
            self._rates.append(row.tokens_per_s)
        cells = {name: getattr(row, name) for name in TRAINING_COLUMNS if name != "attempt"}
        self.writes.attempt(
            "training.csv", lambda: self._training.append(cells | {"attempt": self._attempt})
        )
        beat = {k: v for k, v in cells.items() if k not in ("step", "tokens")}
        self.beats.write("progress", **beat, tokens_seen=row.tokens, finite=True, **row.extra)
        scalars = {k: v for k, v in cells.items() if k not in ("step", "attempt") and v is not None}
        self._board.scalars("train", scalars, row.step)

    def anomaly(self, step: int, fault: str, loss: float, grad_norm: float, skipped: int) -> None:
        """One skipped step."""
        self.event(
            "anomaly", f"step {step} was skipped: {fault}", loss=str(loss), grad_norm=str(grad_norm)
        )
        self.beats.write("anomaly", loss=loss, grad_norm=grad_norm, finite=False, skipped=skipped)

    def mark_anomaly(self, rule: str) -> None:
        """Name the rule that ends the run, for whoever looks at the directory."""
        self.writes.attempt(".anomaly_type", lambda: write_text(self._run.anomaly, rule + "\n"))

    def validation(self, row: ValidationRecord) -> None:
        """One validation."""
        self.validated_steps.add(row.step)
        cells = {name: getattr(row, name) for name in VALIDATION_COLUMNS if name != "attempt"}
        self.writes.attempt(
            "val.csv", lambda: self._validation.append(cells | {"attempt": self._attempt})
        )
        self.beats.write("eval", val_loss=row.val_loss, bits_per_byte=row.bits_per_byte)
        self._board.scalars(
            "val", {"loss": row.val_loss, "bits_per_byte": row.bits_per_byte}, row.step
        )
        self.log.tell(
            f"validation at step {row.step}: loss {row.val_loss:.4f}, "
            f"{row.bits_per_byte:.4f} bits per byte"
        )

    def close(self) -> None:
        """Flush TensorBoard and end the heartbeat thread."""
        self._board.close()
        self.beats.stop()
