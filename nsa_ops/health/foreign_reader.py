"""What is gathered while another trainer's log is read: records on a clock, and how it ended."""

from collections import Counter
from dataclasses import dataclass, field
from math import log
from typing import Any, Literal

from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.health.foreign_lines import LineFigures
from nsa_ops.pod.tracker import RunFacts
from nsa_ops.quantities import format_time

#: A first loss above this is no cross entropy over a vocabulary (ln 10^6 is 13.8 nats).
_MOST_NATS = 15.0
#: What a token of an unknown tokenizer is taken for: little, so that the leak rule is slow to act.
_CAUTIOUS_BYTES_PER_TOKEN = 1.2
#: Time between two records of a log without any times: three of them fill the window of
#: `throughput_low`, fewer would let a single slow one speak.
_GUESSED_RECORD_S = 200.0
#: A figure that fell to a printed 0 from so many units of its last place did not fade out.
_FADING_UNITS = 100
#: A loss that fell by this share has learnt, whatever the log says of gradients.
_LEARNT_SHARE = 0.05
_MOST_CHARACTERS = 200

#: How a log ends: it broke, ran out of memory, was stopped from outside, or says nothing of it.
Ending = Literal["", "crashed", "out_of_memory", "stopped"]


@dataclass(frozen=True)
class ForeignLog:
    """A log as the judge can read it."""

    beats: list[Heartbeat]  # heartbeats in order; a resume in the log begins a new attempt
    facts: RunFacts  # of the run, as far as the log has them
    error: str = ""  # the line by which the log says that the run ended after its last record
    ending: Ending = ""  # how it did
    #: Lines of one shape with figures, the most frequent one, of which no figure was understood.
    num_unread: int = 0


@dataclass
class LogReader:
    """State while a log is read line by line."""

    also: str = ""  # lines that count as records besides those of training: `evaluations` or `bars`
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
    ending: Ending = ""
    epoch: int | None = None
    last_units: dict[str, float] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)

    def beat(self, **fields: Any) -> None:
        """Append a heartbeat at the clock of the log."""
        self.beats.append(
            Heartbeat(
                run_id="log", attempt=self.attempt, rank=0, pid=0, ts=self.clock_s,
                iso=format_time(self.clock_s),
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
        self.error, self.ending = "", ""
        self.overflows = 0
        step_s = self._step_s(figures)
        rate = figures.rate if figures.rate is not None else (1 / step_s if step_s else None)
        data_s = figures.data_s if figures.data_s is not None else self.read_s
        self.beat(
            loss=self._loss(figures), lr=self._value("lr", figures.lr, figures.lr_unit),
            grad_norm=self._value("grad_norm", figures.grad_norm, figures.grad_norm_unit),
            step_s=step_s,
            data_s=data_s, dt_fetch_s=data_s, tokens_per_s=rate, loss_scale=self.loss_scale,
            skipped=self.skipped, finite=False if figures.num_nan else None, **fields,
        )  # fmt: skip

    def _value(self, name: str, value: float | None, unit: float) -> float | None:
        """A figure; None for a printed 0 that may be a small number."""
        if value:
            self.last_units[name] = abs(value) / unit if unit else 0.0
            return value
        if value is None or unit == 0.0 or self.last_units.get(name, 0.0) >= _FADING_UNITS:
            return value
        return None

    def _loss(self, figures: LineFigures) -> float | None:
        """The loss; half of its last place for a printed 0 that may be a small number."""
        loss = self._value("loss", figures.loss, figures.loss_unit)
        return figures.loss_unit / 2 if loss is None and figures.loss == 0.0 else loss

    def end(self, ending: Ending, line: str) -> None:
        """The log says how it ended; a record after it says that it did not."""
        self.ending, self.error = ending, line.strip()[:_MOST_CHARACTERS]

    def _number_step(self, figures: LineFigures) -> None:
        step = figures.step if figures.step is not None else self.bar_step
        is_next_epoch = None not in (figures.epoch, self.epoch) and figures.epoch != self.epoch
        self.epoch = figures.epoch if figures.epoch is not None else self.epoch
        self.total_steps = figures.total_steps or self.total_steps
        if step is None:
            self.last_step += 1
            return
        if step + self.step_offset < self.last_step:
            if self.resumed or (step > 1 and not is_next_epoch):
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
        """A collective that timed out: the loop has made no progress since it began."""
        if self.timed_out:
            return  # the other ranks say the same
        self.timed_out = True
        self.beat(msg="beat")
        self.clock_s += ran_s
        self.beat(msg="beat")

    def overflow(self, scale: float | None) -> None:
        """A step that a loss scaler skipped; a record of its own if no other record is between."""
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


def facts_of_log(reader: LogReader) -> RunFacts:
    """Facts of the run, as far as its log has them."""
    losses = [beat.loss for beat in reader.beats if beat.loss is not None]
    language = not reader.is_policy and bool(losses) and losses[0] < _MOST_NATS
    objective: Literal["language", "other"] = "other" if reader.is_policy else "language"
    return RunFacts(
        total_steps=reader.total_steps,
        bytes_per_token=_CAUTIOUS_BYTES_PER_TOKEN if language else None,
        objective=objective,
        speed_unit="a second, in the log's own unit",  # samples, steps or tokens
    )


def without_unreported(beats: list[Heartbeat]) -> list[Heartbeat]:
    """Records without a figure that is 0 in all of them while the loss fell: it is not measured."""
    losses = [beat.loss for beat in beats if beat.loss is not None]
    if not losses or min(losses) > (1 - _LEARNT_SHARE) * losses[0]:
        return beats
    dead = [
        name
        for name in ("lr", "grad_norm")
        if {value for beat in beats if (value := getattr(beat, name)) is not None} == {0.0}
    ]
    return [beat.model_copy(update=dict.fromkeys(dead)) for beat in beats] if dead else beats
