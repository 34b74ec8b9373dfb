"""Figures: what people look at first of a running attempt, taken from the evidence of the rules."""

from nsa_core.config.base import TolerantModel
from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat, Phase
from nsa_ops.pod.rules.learning_rules import has_gates
from nsa_ops.pod.rules.process_rules import patience_s
from nsa_ops.pod.tracker import HealthEvidence


class PhaseUse(TolerantModel):
    """How much of its patience the current phase has used.

    Attributes:
        phase: What the loop is doing.
        still_s: Seconds since anything moved in it.
        limit_s: Seconds after which the watchdog halts; None where it only warns.
        warn_s: Seconds after which it warns.
    """

    phase: Phase
    still_s: float
    limit_s: float | None = None
    warn_s: float


class RunFigures(TolerantModel):
    """The newest figures of an attempt, each from the newest record that carries it.

    Attributes:
        record: Newest record of training steps; None before the first.
        gates: Newest record with figures of the gates; they are written less often.
        usual_tokens_per_s: The rate that is normal for this run.
        pace_s: Wall seconds a step over the newest records, with validation and checkpoints.
        phase: Patience of the phase; None once the attempt has ended.
    """

    record: Heartbeat | None = None
    gates: Heartbeat | None = None
    usual_tokens_per_s: float | None = None
    pace_s: float | None = None
    phase: PhaseUse | None = None


def figures_of(evidence: HealthEvidence, limits: WatchdogLimits) -> RunFigures:
    """The figures behind a verdict; pure."""
    records = [record for record in evidence.records if record.loss is not None]
    with_gates = (record for record in reversed(evidence.records) if has_gates(record))
    return RunFigures(
        record=records[-1] if records else None,
        gates=next(with_gates, None),
        usual_tokens_per_s=evidence.reference.tokens_per_s,
        pace_s=_pace_s(records),
        phase=_phase_use(evidence, limits),
    )


def _pace_s(records: list[Heartbeat]) -> float | None:
    """None where a clock was set back, or too few records say anything."""
    if not records:
        return None
    first, last = records[0], records[-1]
    steps, seconds = last.step - first.step, last.ts - first.ts
    return seconds / steps if steps > 0 and seconds > 0 else last.step_s


def _phase_use(evidence: HealthEvidence, limits: WatchdogLimits) -> PhaseUse | None:
    has_ended = evidence.process.exit is not None or evidence.process.trainer_alive is False
    if evidence.last is None or has_ended:
        return None
    warn_s, limit_s = patience_s(evidence, limits)
    still_s = max(0.0, evidence.still_s)  # the pod's clock may have been set back
    return PhaseUse(phase=evidence.last.phase, still_s=still_s, limit_s=limit_s, warn_s=warn_s)
