"""Rules about learning: too good to be true, not at all, or with steps that are skipped."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.rank_tracker import MEDIAN_RECORDS
from nsa_ops.pod.rules.loss_rules import last_good_checkpoint, scaler_skips
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.pod.tracker import HealthEvidence

#: A run that shows this first is a language model with random weights (ln 257 is 5.5 nats).
_UNTRAINED_NATS = 5.0
#: No scaler of a run that still learns goes lower.
_LOWEST_SCALE = 1e-3
#: Records whose median a sudden fall is judged by, and how little a level without progress moves.
_FALL_RECORDS = 5
_STILL_SHARE = 0.1
#: Records of the gradient norm that its median is taken over.
_NORM_RECORDS = 100


def loss_too_good(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A loss that no text allows so early: the model sees what it must predict."""
    facts, first = evidence.facts, evidence.reference.first_loss
    if facts.bytes_per_token is None or not facts.fresh or first is None:
        return None
    limit = limits.leak_bits_per_byte * math.log(2) * facts.bytes_per_token
    if first < max(_UNTRAINED_NATS, 2 * limit):
        return None
    newest = [
        (r.step, r.loss)
        for r in evidence.records[-3:]
        if r.loss is not None and math.isfinite(r.loss)
    ]
    if not newest or newest[-1][0] > limits.leak_steps:
        return None
    step, losses = newest[-1][0], [loss for _, loss in newest]
    if losses[-1] >= limit:
        return None
    causality = evidence.machine.causality
    certain = losses[-1] < limit / 10 or (len(losses) == 3 and max(losses) < limit)
    certain = certain and causality not in {"probing", "holds"}
    return Finding(
        rule="loss_too_good",
        level="halt" if certain else "warn",
        sentence=f"The loss {losses[-1]:.3g} at step {step} is below "
        f"{limits.leak_bits_per_byte:g} bits per byte ({limit:.2f} nats per token): no text "
        "reaches that so early. The model sees its targets, or it memorised a tiny text; the "
        "causality probe says: "
        f"{causality}",
        facts={"step": step, "loss": losses[-1], "limit_nats": limit},
    )


def causality_broken(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """The probe changed the future, and an output of the past moved: the model sees its targets."""
    if evidence.machine.causality != "broken":
        return None
    return Finding(
        rule="causality_broken",
        level="halt",
        sentence="The causality probe of this attempt failed: the model sees what it must predict. "
        "Its losses mean nothing; `nsa-ops preflight` shows which part",
        facts={},
    )


def loss_fall(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A loss that falls faster than learning does, long after the start or after a plateau."""
    if evidence.facts.bytes_per_token is None or not evidence.records:
        return None
    fall = _late_fall(evidence.records, limits) or _sudden_fall(evidence.records, limits)
    if fall is None:
        return None
    before, now, within = fall
    step = evidence.records[-1].step
    return Finding(
        rule="loss_fall",
        level="warn",
        sentence=f"The median loss fell from {before:.3f} to {now:.3f} within {within} steps at "
        f"step {step}; the causality probe says: {evidence.machine.causality}",
        facts={"step": step, "before": before, "now": now},
    )


def _late_fall(
    records: Sequence[Heartbeat], limits: WatchdogLimits
) -> tuple[float, float, int] | None:
    """A fall of the 20-record median by `leak_fall_nats` within `leak_fall_steps`, or fewer.

    Records that are further apart than that cannot tell; `_sudden_fall` judges them by shares.
    """
    since = records[-1].step - limits.leak_fall_steps
    end = len(records)
    while end > 1 and records[end - 2].step >= since:
        end -= 1
    if not MEDIAN_RECORDS <= end < len(records) or records[end - 1].step <= limits.leak_steps:
        return None
    before = _median_loss(records[end - MEDIAN_RECORDS : end])
    now = _median_loss(records[-MEDIAN_RECORDS:])
    if before is None or now is None or before - now < limits.leak_fall_nats:
        return None
    return before, now, records[-1].step - records[end - 1].step


def _sudden_fall(
    records: Sequence[Heartbeat], limits: WatchdogLimits
) -> tuple[float, float, int] | None:
    """A fall to `leak_fall_share` of a level that two 20-record medians have agreed on."""
    if len(records) < 2 * MEDIAN_RECORDS + _FALL_RECORDS:
        return None
    levels = records[-2 * MEDIAN_RECORDS - _FALL_RECORDS : -_FALL_RECORDS]
    earlier = _median_loss(levels[:MEDIAN_RECORDS])
    level = _median_loss(levels[MEDIAN_RECORDS:])
    now = _median_loss(records[-_FALL_RECORDS:])
    if earlier is None or level is None or now is None:
        return None
    stood_still = abs(earlier - level) < _STILL_SHARE * earlier
    if not stood_still or now >= limits.leak_fall_share * level:
        return None
    return level, now, records[-1].step - levels[-1].step


def validation_rising(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Validation losses above the best one: far above it, or by more than noise in a row."""
    losses = [validation.loss for validation in evidence.validations]
    if len(losses) < 2:
        return None
    best = min(losses)
    index = losses.index(best)
    before = losses[: index + 1]
    noise = median(abs(now - then) for then, now in pairwise(before)) if index else 0.0
    above = [loss - best > max(noise, _STILL_SHARE * best / 2) for loss in losses[index + 1 :]]
    in_row = next((n for n, is_above in enumerate(reversed(above)) if not is_above), len(above))
    height = losses[-1] - best
    if in_row == 0 or (in_row < limits.validation_in_row and height < limits.validation_nats):
        return None
    must_stop = 0 < limits.validation_halt_in_row <= in_row
    step = evidence.validations[-1].step
    return Finding(
        rule="validation_rising",
        level="halt" if must_stop else "warn",
        sentence=f"The validation loss {losses[-1]:.3f} at step {step} is {height:.2f} nats over "
        f"its best {best:.3f} (step {evidence.validations[index].step}), {in_row} in a row"
        + last_good_checkpoint(evidence),
        facts={"step": step, "best": best, "height": height, "in_row": in_row},
    )


def _median_loss(records: Sequence[Heartbeat]) -> float | None:
    losses = [r.loss for r in records if r.loss is not None and math.isfinite(r.loss)]
    return median(losses) if losses else None


def not_learning(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Nothing can be learnt: the learning rate or the gradient is exactly 0, again and again."""
    if evidence.facts.objective != "language" or not evidence.records:
        return None
    if evidence.records[-1].lr != 0.0 and evidence.records[-1].grad_norm != 0.0:
        return None
    skips = scaler_skips(evidence.records)
    done = [
        record
        for record, skip in zip(evidence.records, skips, strict=True)
        if skip == 0 and record.msg == "progress"
    ]
    newest = done[-limits.zero_in_row :]
    if len(newest) < limits.zero_in_row:
        return None
    step = newest[-1].step
    if all(record.lr == 0.0 for record in newest) and not _schedule_may_be_over(evidence, done):
        what = "learning rate"
    elif step > evidence.facts.warmup_steps and all(r.grad_norm == 0.0 for r in newest):
        what = "gradient norm"
    else:
        return None
    return Finding(
        rule="not_learning",
        level="halt",
        sentence=f"The {what} is exactly 0 on {len(newest)} records in a row up to step {step}: "
        "nothing is learnt",
        facts={"step": step, "what": what},
    )


def _schedule_may_be_over(evidence: HealthEvidence, records: Sequence[Heartbeat]) -> bool:
    total = evidence.facts.total_steps
    if total is not None:
        return records[-1].step >= total
    return evidence.reference.had_learning_rate


def loss_scale_falling(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Step after step is skipped although the loss scale falls, in a run that has trained before.

    The first steps of a run look for their loss scale in the same way; that is not judged.
    """
    if not evidence.records or evidence.records[-1].loss_scale is None:
        return None
    skips = scaler_skips(evidence.records)
    in_row = 0
    start = len(evidence.records)
    for index in range(len(evidence.records) - 1, 0, -1):
        steps = evidence.records[index].step - evidence.records[index - 1].step
        if skips[index] == 0 or skips[index] < steps:
            break
        in_row += skips[index]
        start = index
    trained = sum(skip == 0 for skip in skips[1:start])
    last = evidence.records[-1]
    at_floor = _is_at_floor(evidence.records[-limits.skipped_in_row :])
    if in_row < limits.skipped_in_row or not (at_floor or trained >= MEDIAN_RECORDS):
        return None
    return Finding(
        rule="loss_scale_falling",
        level="halt",
        sentence=f"{in_row} steps in a row were skipped up to step {last.step}, and the loss scale "
        f"is down at {last.loss_scale:g}" + last_good_checkpoint(evidence),
        facts={"step": last.step, "in_row": in_row, "loss_scale": last.loss_scale},
    )


def _is_at_floor(records: Sequence[Heartbeat]) -> bool:
    """Whether the loss scale is as low as scalers go, and steps are skipped all the same."""
    scales = [record.loss_scale for record in records if record.loss_scale is not None]
    return bool(scales) and (
        scales[-1] < _LOWEST_SCALE or (scales[-1] <= 1.0 and scales[0] == scales[-1])
    )


def grad_spike(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A gradient norm that is many times the median of the records before."""
    norms = [r.grad_norm for r in evidence.records if r.grad_norm and math.isfinite(r.grad_norm)]
    if len(norms) < 3 or evidence.records[-1].grad_norm != norms[-1]:
        return None
    usual = median(norms[-_NORM_RECORDS:-1])
    if usual <= 0 or norms[-1] <= limits.grad_spike_factor * usual:
        return None
    return Finding(
        rule="grad_spike",
        level="warn",
        sentence=f"The gradient norm {norms[-1]:.3g} at step {evidence.records[-1].step} is "
        f"{norms[-1] / usual:.0f} times its median {usual:.3g}",
        facts={"step": evidence.records[-1].step, "grad_norm": norms[-1], "median": usual},
    )


def loss_plateau(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """No better median for many steps; the longer a run is, the slower it may get better."""
    reference = evidence.reference
    if not evidence.records or reference.best_loss is None:
        return None
    steps = evidence.records[-1].step - reference.best_step
    if steps <= max(limits.plateau_steps, limits.plateau_share * evidence.records[-1].step):
        return None
    return Finding(
        rule="loss_plateau",
        level="warn",
        sentence=f"The median loss has not been better than {reference.best_loss:.3f} "
        f"(step {reference.best_step}) for {steps} steps",
        facts={"best_loss": reference.best_loss, "best_step": reference.best_step},
    )


def gates_collapsed(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """The worst layer on several new records that carry gate figures, all of them agreeing."""
    records = [record for record in evidence.records if has_gates(record)][-limits.gate_records :]
    if len(records) < limits.gate_records:
        return None
    halt = _find_collapse(
        records, limits.gate_entropy_halt, limits.gate_collapse_halt, limits.gate_max_halt
    )
    warn = _find_collapse(
        records, limits.gate_entropy_warn, limits.gate_collapse_warn, limits.gate_max_warn
    )
    if not (halt or warn):
        return None
    last = records[-1]
    layer = "the worst layer" if last.gate_worst_layer is None else f"layer {last.gate_worst_layer}"
    return Finding(
        rule="gates_collapsed",
        level="halt" if halt else "warn",
        sentence=f"The gates of {layer} collapse: {halt or warn} on {len(records)} records up to "
        f"step {last.step}; gate_collapse_details.json has the figures",
        facts={
            "layer": last.gate_worst_layer,
            "steps": [record.step for record in records],
            "entropy_mean": [record.gate_entropy_mean for record in records],
            "collapse_frac": [record.gate_collapse_frac for record in records],
            "max_gate": [record.gate_max_gate for record in records],
            "branch_shares": last.gate_branch_shares,
        },
    )


def has_gates(record: Heartbeat) -> bool:
    """Whether a record carries gate figures."""
    return record.gate_entropy_mean is not None or record.gate_max_gate is not None


def _find_collapse(
    records: list[Heartbeat], entropy: float, collapsed: float, highest: float
) -> str:
    """The first figure that is beyond its limit on all records, in words; empty if none is."""
    for name, sign, limit in (
        ("gate_entropy_mean", -1, entropy),
        ("gate_collapse_frac", 1, collapsed),
        ("gate_max_gate", 1, highest),
    ):
        values = [getattr(record, name) for record in records]
        if all(value is not None and sign * value > sign * limit for value in values):
            return f"{name} {values[-1]:.3f} {'>' if sign > 0 else '<'} {limit:g}"
    return ""
