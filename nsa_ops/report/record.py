"""RecordedRun: everything a report shows of a run, read from its directory and nothing else."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nsa_core.rundir.bounded_json import (
    MAX_HISTORY_BYTES,
    JsonError,
    read_bounded,
    read_json,
    read_last_records,
)
from nsa_core.rundir.checkpoint import CheckpointState, list_checkpoints, verify_checkpoint
from nsa_core.rundir.data_account import DataAccount, read_account
from nsa_core.rundir.events import Event, read_events
from nsa_core.rundir.exit import ExitRecord, read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_ops.pod.rank_figures import has_counts
from nsa_ops.quantities import format_bytes, parse_count
from nsa_ops.report.rank_history import RankHistory, read_rank_history

#: A line a step of 200 bytes, for more steps than a run has.
MAX_CSV_BYTES = 256 * 2**20
#: Steps and attempts beyond this are no counts: a float does not hold them exactly.
_MAX_COUNT = 2**53
ContentT = TypeVar("ContentT")
#: Where wall time goes, in the order in which a report shows it; spec: goodput.
BUCKETS = (
    "step", "eval", "compile", "init", "provision", "data_wait", "checkpoint_stall",
    "rollback_lost", "hang", "down",
)  # fmt: skip


@dataclass(frozen=True)
class LoggedStep:
    """One logged step: the numbers that its line held, by column name.

    Attributes:
        values: Every other column that is a number; NaN and infinity are kept as they are.
    """

    attempt: int
    step: int
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepLog:
    """The rows that make up the run's history.

    Attributes:
        rows: One row a step, in order of steps.
        replaced: Rows of earlier attempts that a later attempt did again or rolled back.
        torn: Lines that are no row: cut off by a kill or a full disk.
    """

    rows: list[LoggedStep]
    replaced: int = 0
    torn: int = 0

    def column(self, name: str) -> list[tuple[float, float]]:
        """Points (step, value) of one column, where it has a number."""
        return [(row.step, row.values[name]) for row in self.rows if name in row.values]


def read_rows(path: Path) -> StepLog | None:
    """The history in a CSV file with a header; None if there is no such file.

    A file that is longer than any run's is one torn line.
    """
    if not path.is_file():
        return None
    try:
        text = read_bounded(path, MAX_CSV_BYTES).decode(errors="replace")
    except JsonError:
        return StepLog([], torn=1)
    lines = parse_lines(text)
    if lines and not text.endswith("\n"):
        lines[-1] = {}
    rows: list[LoggedStep] = []
    for line in lines:
        row = _parse_row(line, rows[-1] if rows else None)
        if row is not None:
            rows.append(row)
    joined = join_attempts(rows)
    return StepLog(joined, replaced=len(rows) - len(joined), torn=len(lines) - len(rows))


def parse_lines(text: str) -> list[dict[str, str]]:
    """Cells by column of each line below the header; empty for a line that is none of this table.

    A line that no CSV reader takes costs only itself.
    """
    reader = csv.reader(text.splitlines())
    header: list[str] | None = None
    lines: list[dict[str, str]] = []
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return lines
        except csv.Error:
            cells = [""]
        if header is None:
            header = cells
        elif cells:
            lines.append(dict(zip(header, cells, strict=True)) if len(cells) == len(header) else {})


def join_attempts(rows: Sequence[LoggedStep]) -> list[LoggedStep]:
    """One row a step: an attempt that begins at step s replaces all earlier rows from s on."""
    kept: list[LoggedStep] = []
    for row in rows:
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return kept


def _parse_row(line: dict[str, str], previous: LoggedStep | None) -> LoggedStep | None:
    """A row, or None for a torn line or a repeated header.

    A file without an `attempt` column begins another attempt wherever the step goes back.
    """
    numbers = {
        name.strip(): number
        for name, text in line.items()
        if (number := _parse_number(text)) is not None
    }
    step = numbers.pop("step", math.nan)
    if not abs(step) <= _MAX_COUNT:
        return None
    attempt = numbers.pop("attempt", math.nan)
    if not abs(attempt) <= _MAX_COUNT:
        attempt = _guess_attempt(step, previous)
    return LoggedStep(int(attempt), int(step), numbers)


def _guess_attempt(step: float, previous: LoggedStep | None) -> int:
    if previous is None:
        return 1
    return previous.attempt + (1 if step <= previous.step else 0)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Sample:
    """Text the model wrote, what it was given, and how tokens were drawn."""

    prompt: str
    text: str
    drawn: str = ""


@dataclass(frozen=True)
class RecordedAttempt:
    """One attempt of the run: its manifest and how it ended, where the directory has them."""

    number: int
    manifest: RunManifest | None
    exit: ExitRecord | None


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory holds.

    Attributes:
        attempts: All attempts, the current one last.
        beats: Heartbeats of rank 0 that carry progress.
        last_beat: Its newest heartbeat of any kind.
        goodput_s: Seconds in each bucket of wall time.
        checkpoints: Checkpoints with a manifest, newest first, hashed again.
        data: What was dropped of the data, and why; None where the run kept no account.
        missing: What the directory lacks or what cannot be read, one line each.
        ranks: What each rank did; empty where the run has one.
    """

    run: RunDir
    attempts: list[RecordedAttempt]
    training: StepLog | None
    validation: StepLog | None
    beats: list[Heartbeat]
    last_beat: Heartbeat | None
    events: list[Event]
    goodput_s: dict[str, float]
    environment: dict[str, Any]
    metrics: dict[str, Any]
    checkpoints: list[CheckpointState]
    samples: list[Sample]
    data: DataAccount | None = None
    missing: list[str] = field(default_factory=list)
    ranks: RankHistory = field(default_factory=RankHistory)

    @property
    def manifest(self) -> RunManifest | None:
        """Manifest of the newest attempt that has one."""
        return next((a.manifest for a in reversed(self.attempts) if a.manifest), None)

    @property
    def run_id(self) -> str:
        """The run id as launched; the folder's name where the manifest is missing."""
        return self.manifest.run_id if self.manifest else self.run.run_id


def read_record(run: RunDir) -> RecordedRun:
    """Read a run directory; what is missing or damaged is named in the record, not an error."""
    missing: list[str] = []
    read = read_last_records(run.heartbeat(), Heartbeat, MAX_HISTORY_BYTES).records
    beats = [beat for beat in read if has_counts(beat)]
    missing += [
        f"{path.name} is longer than {format_bytes(MAX_HISTORY_BYTES)}: its beginning was not read"
        for path in (run.heartbeat(), run.events)
        if path.is_file() and path.stat().st_size > MAX_HISTORY_BYTES
    ]
    attempts, progress = _read_attempts(run, missing), [b for b in beats if b.msg == "progress"]
    manifest = next((one.manifest for one in reversed(attempts) if one.manifest), None)
    return RecordedRun(
        run=run,
        attempts=attempts,
        training=_note(read_rows(run.training_csv), run.training_csv, missing),
        validation=_note(read_rows(run.validation_csv), run.validation_csv, missing),
        beats=_note(progress, run.heartbeat(), missing),
        last_beat=beats[-1] if beats else None,
        events=_note(read_events(run), run.events, missing),
        goodput_s=parse_goodput(_read_json(run.goodput, missing)),
        environment=_as_mapping(_read_json(run.env, missing)),
        metrics=_as_mapping(_read_json(run.metrics, missing)),
        checkpoints=[verify_checkpoint(one.path) for one in list_checkpoints(run)],
        samples=parse_samples(_read_json(run.samples, missing)),
        data=_read_data(run, missing),
        missing=missing,
        ranks=read_rank_history(run, manifest, progress, missing),
    )


def _note(content: ContentT, path: Path, missing: list[str]) -> ContentT:
    """The content itself; empty content is noted as missing."""
    if not content:
        missing.append(f"{path.name} is missing" if not path.exists() else f"{path.name} is empty")
    return content


def _read_attempts(run: RunDir, missing: list[str]) -> list[RecordedAttempt]:
    kept = run.attempt(1).parent
    names = [folder.name for folder in kept.iterdir()] if kept.is_dir() else []
    numbers = sorted(number for name in names if (number := parse_count(name)) is not None)
    earlier = [_read_attempt(RunDir(run.attempt(one)), one, missing) for one in numbers]
    return [*earlier, _read_attempt(run, numbers[-1] + 1 if numbers else 1, missing)]


def _read_attempt(run: RunDir, number: int, missing: list[str]) -> RecordedAttempt:
    try:
        manifest = read_manifest(run)
    except (ManifestError, OSError) as error:
        missing.append(str(error))
        return RecordedAttempt(number, None, read_exit(run))
    return RecordedAttempt(manifest.attempt, manifest, read_exit(run))


def _read_json(path: Path, missing: list[str]) -> object:
    try:
        return read_json(path, is_nan_allowed=True)
    except FileNotFoundError:
        missing.append(f"{path.name} is missing")
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}")
    except ValueError as error:
        missing.append(f"{path.name} cannot be read: {error}")
    return None


def _read_data(run: RunDir, missing: list[str]) -> DataAccount | None:
    """The account of the data; runs of older versions have none, which is no fault of theirs."""
    try:
        return read_account(run.data_account)
    except (OSError, ValueError) as error:
        missing.append(f"data/{run.data_account.name} cannot be read: {error}")
    return None


def _as_mapping(content: object) -> dict[str, Any]:
    return dict(content) if isinstance(content, dict) else {}


def parse_goodput(content: object) -> dict[str, float]:
    """Seconds by bucket in the order of `BUCKETS`, from the content of goodput.json."""
    seconds = {
        name: float(value)
        for name, value in _as_mapping(_as_mapping(content).get("buckets")).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: seconds[name] for name in BUCKETS if seconds.get(name, 0) > 0}


def parse_samples(content: object) -> list[Sample]:
    """Generated texts, from the content of samples.json."""
    entries = map(_as_mapping, content if isinstance(content, list) else [])
    return [
        Sample(str(entry.get("prompt", "")), str(entry["text"]), _describe_draw(entry))
        for entry in entries
        if "text" in entry
    ]


def _describe_draw(entry: Mapping[str, object]) -> str:
    temperature = entry.get("temperature")
    if not isinstance(temperature, int | float):
        return ""
    return f"temperature {temperature:g}" if temperature else "greedy"
