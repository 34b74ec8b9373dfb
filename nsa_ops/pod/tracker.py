"""HealthEvidence: everything the rules judge, and the Tracker that gathers it beat by beat.

The tracker never compares two clocks. Its caller says when it saw a beat: the watchdog by its
own monotonic clock, a one-shot probe by the time stamps of the pod that wrote the beats.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite, log
from statistics import median
from typing import Literal

from nsa_core.config.run import RunConfig
from nsa_core.rundir.exit import ExitRecord
from nsa_core.rundir.heartbeat import Heartbeat, Phase
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.pod.card_watch import CardEvidence
from nsa_ops.pod.leak import Causality
from nsa_ops.pod.rank_evidence import RankEvidence
from nsa_ops.pod.rank_figures import has_counts
from nsa_ops.pod.rank_tracker import MEDIAN_RECORDS, RankTracker, is_new, is_record

KEPT_RECORDS = 256
KEPT_VALIDATIONS = 64
#: Records whose median is the level of a plateau: the lowest of many medians of 20 is a lucky one
#: (docs/watchdog.md has what was measured).
LEVEL_RECORDS = 50
#: Records after which the run's own rate is known well enough to be a reference.
_FIRST_RATES = 5

#: Bytes of English text or code in one token, about; None where nothing is known.
_BYTES_PER_TOKEN = {"byte": 1.0, "gpt2": 4.3, "bpe": 3.0}


@dataclass(frozen=True)
class RunFacts:
    """What the configuration says that the rules need.

    Attributes:
        total_steps: Steps of the whole schedule; None if unknown.
        fresh: The run began from random weights.
        uniform_nats: Loss of random weights, ln of the vocabulary; None if unknown.
        objective: `language` is a cross entropy over tokens; for anything else, such as a policy
            loss, 0 is a value like any other.
        collective_timeout_s: After so long, ranks that wait for another one give up; None where
            there is one rank.
        num_pods: Pods of the run; the ranks of the others are judged there.
        speed_unit: What its throughput counts.
    """

    total_steps: int | None = None
    warmup_steps: int = 0
    bytes_per_token: float | None = None
    fresh: bool = True
    uniform_nats: float | None = None
    objective: Literal["language", "other"] = "language"
    collective_timeout_s: float | None = None
    num_pods: int = 1
    speed_unit: str = "tokens/s"


def facts_of(config: RunConfig, *, fresh: bool) -> RunFacts:
    """The facts of a run of this project."""
    known = None if config.data.source == "synthetic" else config.data.tokenizer
    return RunFacts(
        total_steps=config.schedule.steps,
        warmup_steps=config.schedule.warmup_steps,
        bytes_per_token=_BYTES_PER_TOKEN[known] if known else None,
        fresh=fresh,
        uniform_nats=log(config.model.vocab_size),
        collective_timeout_s=config.runtime.collective_timeout_s if config.num_ranks > 1 else None,
        num_pods=config.runtime.num_pods,
    )


@dataclass(frozen=True)
class ProcessEvidence:
    """What the process table and the run directory say about the attempt.

    Attributes:
        trainer_alive: The recorded trainer lives; None if none was recorded.
        known_good_step: Newest one after which the trainer has seen enough clean steps.
    """

    trainer_alive: bool | None = None
    age_s: float = 0.0
    exit: ExitRecord | None = None
    checkpoint_step: int | None = None
    known_good_step: int | None = None


@dataclass(frozen=True)
class MachineEvidence:
    """What the pod has left, what its cards show, and what the causality probe found there."""

    disk_free_bytes: int | None = None
    checkpoint_bytes: int | None = None
    host_memory_fraction: float | None = None
    cards: CardEvidence | None = None
    causality: Causality = "not probed"


@dataclass(frozen=True)
class Reference:
    """What is normal for this run, from its own first records.

    Attributes:
        tokens_per_s: Best 20-record median of the rate, or the median of the first five records if
            that is higher, so that a long slow time does not become what is normal; with fewer
            records, the median of all but the newest. What earlier attempts reached counts too.
        is_from_before: It was reached before the records that are known, as by an earlier attempt.
        best_loss: Lowest median of up to `LEVEL_RECORDS` losses; None before there are 20.
    """

    first_loss: float | None = None
    tokens_per_s: float | None = None
    is_from_before: bool = False
    best_loss: float | None = None
    best_step: int = 0
    had_learning_rate: bool = False


@dataclass(frozen=True)
class Validation:
    """One validation: optimizer steps done, and nats per token."""

    step: int
    loss: float


@dataclass(frozen=True)
class HealthEvidence:
    """What is known of one attempt at one moment; the rules know nothing else.

    Attributes:
        alive_age_s: Seconds since `alive_seq` moved.
        still_s: Seconds since `progress_seq` moved or the phase changed.
        phase_durations_s: How long the last finished phase of each kind took.
        records: Newest progress lines and skipped steps, oldest first.
        lead: The first rank as a rank; where it is alone, only what the fields above do not have.
        validations: Newest validation losses, oldest first.
        ranks: Every rank of this pod, where the run has several; else empty. All fields above are
            those of the first one.
    """

    facts: RunFacts
    process: ProcessEvidence
    machine: MachineEvidence
    last: Heartbeat | None
    alive_age_s: float
    still_s: float
    phase_durations_s: dict[Phase, float]
    records: tuple[Heartbeat, ...]
    reference: Reference
    lead: RankEvidence
    validations: tuple[Validation, ...] = ()
    ranks: tuple[RankEvidence, ...] = ()

    @property
    def every_rank(self) -> tuple[RankEvidence, ...]:
        """All ranks of this pod whose heartbeats can be used; the only one, where it is alone."""
        return tuple(rank for rank in self.ranks or (self.lead,) if not rank.problem)


@dataclass
class Tracker:
    """Follows the heartbeats of one attempt; a newer attempt begins it anew.

    Attributes:
        attempt: The attempt that is followed; of earlier ones only the rate is taken.
        earlier_rate: Best median rate of the run before what is fed, in tokens/s; None if unknown.
        ranks: Ranks of this pod, where the run has several; the first one leads, and the figures of
            the run are its own.
    """

    facts: RunFacts
    attempt: int
    earlier_rate: float | None = None
    ranks: range | None = None
    _ranks: dict[int, RankTracker] = field(init=False)
    _lead: RankTracker = field(init=False)
    _records: deque[Heartbeat] = field(default_factory=lambda: deque(maxlen=KEPT_RECORDS))
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=LEVEL_RECORDS))
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_RECORDS))
    _rates_before: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_RECORDS))
    _best_rate: float | None = None
    _validations: deque[Validation] = field(default_factory=lambda: deque(maxlen=KEPT_VALIDATIONS))
    _first_loss: float | None = None
    _best: tuple[float, int] | None = None
    _had_learning_rate: bool = False

    def __post_init__(self) -> None:
        """Follow every rank from its first beat on."""
        self._ranks = {rank: RankTracker(rank) for rank in self.ranks or range(1)}
        self._lead = next(iter(self._ranks.values()))

    def feed(self, beats: Iterable[Heartbeat], at_s: float | None = None) -> None:
        """Take in beats of the leading rank, oldest first; those with impossible counts are not.

        `at_s`: when they were seen by the watcher's clock; None takes each beat's own time.
        """
        for beat in filter(has_counts, beats):
            if beat.attempt == self.attempt:
                self._take(beat, beat.ts if at_s is None else at_s)
            elif beat.attempt < self.attempt and beat.tokens_per_s is not None:
                self.earlier_rate = _best_median(
                    self._rates_before, beat.tokens_per_s, self.earlier_rate
                )

    def feed_rank(
        self, rank: int, beats: Iterable[Heartbeat], problem: str, at_s: float | None = None
    ) -> None:
        """Take in beats of another rank of this pod; `at_s` as of `feed`.

        `problem`: why lines of it cannot be used; empty if all can.
        """
        followed = self._ranks[rank]
        for beat in beats:
            if beat.attempt == self.attempt:
                followed.take(beat, beat.ts if at_s is None else at_s)
        followed.problem = problem if followed.last is None else ""

    @property
    def best_rate(self) -> float | None:
        """Best median rate of the run so far, in tokens/s; the next attempt is compared with it."""
        known = [rate for rate in (self._best_rate, self.earlier_rate) if rate is not None]
        return max(known, default=None)

    def _take(self, beat: Heartbeat, at_s: float) -> None:
        self._lead.take(beat, at_s)
        if beat.val_loss is not None and isfinite(beat.val_loss):
            self._validations.append(Validation(beat.step, beat.val_loss))
        if is_record(beat) and (not self._records or is_new(beat, self._records[-1])):
            self._take_record(beat)

    def _take_record(self, record: Heartbeat) -> None:
        self._records.append(record)
        self._had_learning_rate = self._had_learning_rate or bool(record.lr)
        if record.loss is not None and record.finite is not False:
            self._take_loss(record.loss, record.step)
        if record.tokens_per_s is not None:
            self._best_rate = _best_median(self._rates, record.tokens_per_s, self._best_rate)

    def _take_loss(self, loss: float, step: int) -> None:
        if self._first_loss is None:
            self._first_loss = loss
        self._losses.append(loss)
        if len(self._losses) >= MEDIAN_RECORDS:
            level = median(self._losses)
            if self._best is None or level < self._best[0]:
                self._best = (level, step)

    def evidence(
        self, now_s: float, process: ProcessEvidence, machine: MachineEvidence
    ) -> HealthEvidence:
        """What is known now, by the same clock as `feed`."""
        ranks = self._rank_evidence(now_s)
        return HealthEvidence(
            facts=self.facts,
            process=process,
            machine=machine,
            last=self._lead.last,
            alive_age_s=self._lead.alive_age_s(now_s),
            still_s=self._lead.still_s(now_s),
            phase_durations_s=dict(self._lead.durations_s),
            records=tuple(self._records),
            reference=self._reference(),
            validations=tuple(self._validations),
            ranks=ranks,
            lead=ranks[0] if ranks else self._lead.brief(),
        )

    def _rank_evidence(self, now_s: float) -> tuple[RankEvidence, ...]:
        if self.ranks is None:
            return ()
        return tuple(one.evidence(now_s) for one in self._ranks.values())

    def _reference(self) -> Reference:
        # The newest rate is what is judged: it must not be its own reference while there are few.
        few = list(self._rates)[:-1] or list(self._rates)
        own = self._best_rate or (median(few) if few else None)
        is_earlier = self.earlier_rate is not None and (own or 0.0) < self.earlier_rate
        return Reference(
            first_loss=self._first_loss,
            tokens_per_s=self.earlier_rate if is_earlier else own,
            is_from_before=is_earlier,
            best_loss=self._best[0] if self._best else None,
            best_step=self._best[1] if self._best else 0,
            had_learning_rate=self._had_learning_rate,
        )


def tracker_of(manifest: RunManifest, earlier_rate: float | None) -> Tracker:
    """A tracker of the attempt of a manifest; `earlier_rate` as of `Tracker`."""
    facts = facts_of(manifest.config, fresh=manifest.parent is None)
    ranks = manifest.pod_ranks if manifest.config.num_ranks > 1 else None
    return Tracker(facts, manifest.attempt, earlier_rate, ranks)


def _best_median(rates: deque[float], rate: float, best: float | None) -> float | None:
    """Take in a rate; the best median of the first few rates and of every full window since."""
    rates.append(rate)
    if len(rates) in {_FIRST_RATES, MEDIAN_RECORDS}:
        return max(best or 0.0, median(rates))
    return best
