"""Logs of other trainers as heartbeats, so that the same judge can be tried on them.

`parse_log(text)` is pure. What a log does not tell is left out; where it tells the time of a step
but no rate, the rate is in steps a second, which serves as well for the run's own median.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import log
from typing import Any, Literal

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.evidence import RunFacts
from nsa_ops.pod.foreign_lines import LineFigures, clean, find_step, parse_line, parse_lines

#: A first loss above this is no cross entropy over a vocabulary (ln 10^6 is 13.8 nats).
_MOST_NATS = 15.0
#: What a token of an unknown tokenizer is taken for: little, so that the leak rule is slow to act.
_CAUTIOUS_BYTES_PER_TOKEN = 1.2
#: Time between two records of a log that tells no times at all.
_GUESSED_RECORD_S = 60.0
_MOST_CHARACTERS = 200
#: Longer lines hold no figures of a step, and patterns must not wander through them.
_MOST_LINE = 20_000

_MULTILINE = re.compile(r"\[step=[\d,]+/")
_CONTINUED = re.compile(r"^\s+[\w/().\- ]+=\S")
_OVERFLOW = re.compile(r"\bOVERFLOW!|overflow detected, setting loss scale to", re.IGNORECASE)
_NEW_SCALE = re.compile(r"(?:reducing to|loss scale to:?)\s*([\d.e+]+)", re.IGNORECASE)
_ROUTER = re.compile(r"layer:?\s*(\d+).*?topk_idx:?\s*\[([\d,\s]+)\]")
_READ_TIME = re.compile(r"read batch time\s*:\s*'?,?\s*([\d.e-]+)")
_LOAD = re.compile(
    r"(?:layer:?\s*(\d+).*?)?(?:tokens[ _]per[ _]expert|expert[ _](?:load|counts?|usage|tokens))"
    r"\W*\[([\d.,\s]+)\]",
    re.IGNORECASE,
)
_COLLECTIVE = re.compile(r"collective operation timeout.*ran for (\d+) mil")
_RESUMED = re.compile(r"\bresum(?:ing|ed)\b|loading checkpoint from", re.IGNORECASE)
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)*(?:Traceback \(most recent call last\)|(?:\w+\.)*\w+Error\b|"
    r"Segmentation fault|Killed$|Bus error)|error during training|CUDA out of memory|"
    r"ChildFailedError|exited with exit code [1-9]|collective operation timeout|"
    r"NCCL operations have failed|nccl(?:Remote|Internal|System)Error|watchdog got stuck|"
    r"terminate called after throwing|loss is probably exploding",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class ForeignLog:
    """A log as the judge can read it.

    Attributes:
        beats: Heartbeats in order; a resume in the log begins a new attempt.
        facts: What could be told about the run.
        error: The line by which the log says that the run broke after its last record.
    """

    beats: list[Heartbeat]
    facts: RunFacts
    error: str = ""


@dataclass
class _Reader:
    """State while a log is read line by line.

    Attributes:
        also: Lines that count as records besides those of training: `evaluations` or `bars`.
    """

    also: str = ""
    beats: list[Heartbeat] = field(default_factory=list)
    attempt: int = 1
    clock_s: float = 0.0
    progress_seq: int = 0
    step_offset: int = 0
    last_step: int = 0
    bar_step: int | None = None
    total_steps: int | None = None
    skipped: int = 0
    loss_scale: float | None = None
    read_s: float | None = None
    train_ms: float | None = None
    is_policy: bool = False
    resumed: bool = False
    overflows: int = 0
    timed_out: bool = False
    error: str = ""

    def beat(self, **fields: Any) -> None:
        """Append a heartbeat at the clock of the log."""
        self.beats.append(
            Heartbeat(
                run_id="log", attempt=self.attempt, rank=0, pid=0, ts=self.clock_s,
                iso=datetime.fromtimestamp(self.clock_s, UTC).isoformat(),
                **{"msg": "progress", "phase": "train", "alive_seq": len(self.beats),
                   "progress_seq": self.progress_seq, "step": self.last_step, **fields},
            )
        )  # fmt: skip

    def progress(self, figures: LineFigures, **fields: Any) -> None:
        """Append a record of training steps."""
        before = self.last_step
        self._number_step(figures)
        self._advance_clock(figures, max(self.last_step - before, 1))
        self.progress_seq += 1
        self.skipped += int(figures.skipped or 0)
        if figures.loss_scale is not None:
            self.loss_scale = figures.loss_scale
        self.is_policy = self.is_policy or figures.is_policy
        self.error = ""
        self.overflows = 0
        step_s = self._step_s(figures)
        rate = figures.rate if figures.rate is not None else (1 / step_s if step_s else None)
        data_s = figures.data_s if figures.data_s is not None else self.read_s
        self.beat(
            loss=figures.loss, lr=figures.lr, grad_norm=figures.grad_norm, step_s=step_s,
            data_s=data_s, dt_fetch_s=data_s, tokens_per_s=rate, loss_scale=self.loss_scale,
            skipped=self.skipped, finite=False if figures.num_nan else None, **fields,
        )  # fmt: skip

    def _number_step(self, figures: LineFigures) -> None:
        step = figures.step if figures.step is not None else self.bar_step
        self.total_steps = figures.total_steps or self.total_steps
        if step is None:
            self.last_step += 1
            return
        if step + self.step_offset < self.last_step:
            if self.resumed or step > 1:
                self._begin_attempt()
            else:
                self.step_offset = self.last_step  # counted anew in every epoch
        elif self.resumed and self.beats:
            self._begin_attempt()
        self.resumed = False
        self.last_step = step + self.step_offset

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self.step_offset = 0

    def _advance_clock(self, figures: LineFigures, steps: int) -> None:
        """Go on to the line's time stamp, or by the time of its steps, or by a guess."""
        if figures.unix_s is not None:
            self.clock_s = figures.unix_s
        else:
            self.clock_s += _GUESSED_RECORD_S if figures.step_s is None else figures.step_s * steps

    def _step_s(self, figures: LineFigures) -> float | None:
        if figures.train_ms is None:
            return figures.step_s
        before, self.train_ms = self.train_ms, figures.train_ms
        if before is None or figures.train_ms <= before:
            return None
        steps = self.last_step - (self.beats[-1].step if self.beats else 0)
        return (figures.train_ms - before) / 1000 / max(steps, 1)

    def collective_timeout(self, ran_s: float) -> None:
        """A collective that timed out: the loop has stood still since it began."""
        if self.timed_out:
            return  # the other ranks say the same
        self.timed_out = True
        self.beat(msg="beat")
        self.clock_s += ran_s
        self.beat(msg="beat")

    def overflow(self, scale: float | None) -> None:
        """A step that a loss scaler skipped; a record of its own if no record stands between."""
        self.skipped += 1
        self.overflows += 1
        self.loss_scale = self.loss_scale if scale is None else scale
        if self.overflows > 1 and self.loss_scale is not None:
            self.progress_seq += 1
            self.beat(
                step=self.last_step + self.overflows, skipped=self.skipped,
                loss_scale=self.loss_scale,
            )  # fmt: skip

    def router(self, layer: str | None, counts: list[float]) -> None:
        """How a layer spreads its tokens over experts; the shares are judged as gates are."""
        total = sum(counts)
        shares = [count / total for count in counts if count > 0]
        if not shares:
            return
        self.clock_s += 1.0
        self.progress_seq += 1
        self.beat(
            gate_entropy_mean=-sum(share * log(share) for share in shares),
            gate_max_gate=max(shares),
            gate_collapse_frac=float(max(shares) > 0.95),
            gate_worst_layer=int(layer) if layer else None,
        )


def parse_log(text: str) -> ForeignLog:
    """Read a log of any known kind; what is not understood is passed over.

    A log without a training loss is read again for its evaluations, and one without those for the
    rates of its progress bars.
    """
    series = _parse_series(text)
    if series is not None:
        return series
    first = _read(text, "")
    for also in ("evaluations", "bars"):
        if not first.beats and (again := _read(text, also)).beats:
            first = again
    return ForeignLog(first.beats, _facts(first), first.error)


def _read(text: str, also: str) -> _Reader:
    reader = _Reader(also=also)
    for lines in _records(text):
        _take(reader, lines)
    return reader


def _records(text: str) -> Iterator[list[str]]:
    """Lines, and the lines of one record together where it has several."""
    pending: list[str] = []
    for raw in re.split(r"[\r\n]+", text):
        line = clean(raw[:_MOST_LINE])
        if pending and _CONTINUED.match(line):
            pending.append(line)
            continue
        if pending:
            yield pending
        pending = [line] if _MULTILINE.search(line) else []
        if not pending:
            yield [line]
    if pending:
        yield pending


def _take(reader: _Reader, lines: list[str]) -> None:
    line = lines[0]
    if found := _COLLECTIVE.search(line):
        reader.collective_timeout(int(found[1]) / 1000)
        reader.error = reader.error or line.strip()[:_MOST_CHARACTERS]
    elif found := _ROUTER.search(line):
        chosen = Counter(found[2].replace(" ", "").split(","))
        reader.router(found[1], [float(count) for count in chosen.values()])
    elif found := _LOAD.search(line):
        reader.router(found[1], [float(word) for word in re.findall(r"[\d.]+", found[2])])
    elif found := _READ_TIME.search(line):
        reader.read_s = float(found[1])
    elif _OVERFLOW.search(line):
        scale = _NEW_SCALE.search(line)
        reader.overflow(float(scale[1]) if scale else None)
    else:
        _take_figures(reader, lines)


def _take_figures(reader: _Reader, lines: list[str]) -> None:
    figures = parse_lines(lines) if len(lines) > 1 else parse_line(lines[0])
    is_bar = "%|" in lines[0]
    if figures.is_record:
        reader.progress(figures)
    elif reader.also == "evaluations" and figures.evaluation_loss is not None:
        reader.progress(replace(figures, loss=figures.evaluation_loss))
    elif reader.also == "bars" and is_bar and (figures.rate or figures.step_s):
        reader.progress(figures)
    elif is_bar:
        step, total = find_step(lines[0])
        reader.bar_step, reader.total_steps = step, total or reader.total_steps
    elif _RESUMED.search(lines[0]):
        reader.resumed = True
    elif not reader.error and _ERROR.search(lines[0]):
        reader.error = lines[0].strip()[:_MOST_CHARACTERS]


def _facts(reader: _Reader) -> RunFacts:
    losses = [beat.loss for beat in reader.beats if beat.loss is not None]
    language = not reader.is_policy and bool(losses) and losses[0] < _MOST_NATS
    objective: Literal["language", "other"] = "other" if reader.is_policy else "language"
    return RunFacts(
        total_steps=reader.total_steps,
        bytes_per_token=_CAUTIOUS_BYTES_PER_TOKEN if language else None,
        objective=objective,
    )


def _parse_series(text: str) -> ForeignLog | None:
    """A JSON object of series, `{"lm loss": {"values": {"1": 12.9}}}`; "nan" means no data."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    series = {
        name: values
        for name, content in document.items()
        if isinstance(content, dict) and isinstance(values := content.get("values"), dict)
    }
    losses = next((values for name, values in series.items() if "loss" in name.lower()), None)
    if losses is None:
        return None
    times = series.get("iteration-time", {})
    reader = _Reader()
    for step, loss in losses.items():
        if isinstance(loss, (int, float)):
            step_s = times.get(step)
            reader.progress(
                LineFigures(
                    step=int(step),
                    loss=float(loss),
                    step_s=float(step_s) if isinstance(step_s, (int, float)) else None,
                )
            )
    return ForeignLog(reader.beats, _facts(reader))
