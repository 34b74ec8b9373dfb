"""Rules about broken losses: not finite, missing, or far above what they were."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.rank_tracker import MEDIAN_RECORDS
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.pod.tracker import HealthEvidence
from nsa_ops.quantities import count_of

#: A jump that has not come back by half of its height after so many records will not.
_SETTLED_IN_ROW = 10
#: A row of jumps counts when it spans so many steps; in logs of every single step, when it has so
#: many records without coming down. Large runs have spikes of three or four steps that pass by
#: themselves (BLOOM-176B at step 31216), and divergence that is logged every ten steps.
_ROW_STEPS = 20
_ROW_RECORDS = 5
_HIGH_SHARE = 0.8
#: A height that no ordinary spike keeps. The logs of docs/watchdog.md have spikes of 2.3 times the
#: level that pass by themselves (BLOOM-176B), none of which lasts; and one record of 1.8 times.
_FAR_FACTOR = 2.0
_STEEP_FACTOR = 3.0
_STEEP_RECORDS = 2
_FAR_NATS = 1.0
#: A median so many jumps over the best one is lost, however slowly it got there.
_LOST_FACTOR = 2.0
#: A loss that was below this share of the level of random weights had learnt something.
_LEARNT_SHARE = 0.75
#: A gradient norm that so many times its last value is no noise.
_EXPLODED_FACTOR = 20.0
#: ln of the smallest of the usual vocabularies of language models (GPT-2: 50,257), where unknown.
_USUAL_UNIFORM_NATS = 10.82
#: A fresh run may still be finding its feet: 12.2 nats at step 2 came back (docs/watchdog.md, L07).
_FIRST_STEPS = 100
#: A gradient norm so many times its median supports a jump of the loss.
_SUPPORT_FACTOR = 2.0
#: Records that are looked at for one jump: patience, the median before it, and some room.
_JUMP_RECORDS = 80
_HUNDRED = 100


def fault_of(record: Heartbeat, *, skipped: bool = False, zero_is_fault: bool = True) -> str | None:
    """What is wrong with the loss or gradient of a record; None if it is sound.

    `skipped`: A loss scaler skipped a step since the record before: then a missing loss or an
    infinite gradient is how it works.
    `zero_is_fault`: A loss of exactly 0 is wrong, as it is for a language model.
    """
    if record.loss is None and record.finite is False:
        return "loss missing or not finite"
    if record.loss is not None and not math.isfinite(record.loss):
        return f"loss {record.loss}"
    if record.loss == 0.0 and zero_is_fault:
        return "loss exactly 0"
    if skipped:
        return None
    if record.grad_norm is not None and not math.isfinite(record.grad_norm):
        return f"gradient norm {record.grad_norm}"
    return "gradient not finite" if record.finite is False else None


def scaler_skips(records: Sequence[Heartbeat]) -> list[int]:
    """Steps that a loss scaler skipped between each record and the one before it."""
    if not records or records[-1].loss_scale is None:
        return [0] * len(records)
    skips = [0] * min(1, len(records))
    for before, record in pairwise(records):
        known = record.loss_scale is not None and None not in (record.skipped, before.skipped)
        skips.append(max(0, (record.skipped or 0) - (before.skipped or 0)) if known else 0)
    return skips


def loss_nonfinite(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Bad losses or gradients: one warns, some in a row or among a hundred halt."""
    records = evidence.records[-_HUNDRED:]
    skips = scaler_skips(records)
    language = evidence.facts.objective == "language"
    faults = [
        fault_of(record, skipped=skip > 0, zero_is_fault=language)
        for record, skip in zip(records, skips, strict=True)
    ]
    if not any(faults):
        return None
    in_row = _faults_in_row(records, faults)
    bad = [
        record
        for record, fault in zip(records, faults, strict=True)
        if fault and (record.msg != "anomaly" or records[-1].step - record.step < _HUNDRED)
    ]
    if not bad:
        return None
    many = in_row >= limits.nonfinite_in_row or len(bad) >= limits.nonfinite_in_100
    newest = next(fault for fault in reversed(faults) if fault)
    return Finding(
        rule="loss_nonfinite",
        level="halt" if many else "warn",
        sentence=f"{newest} at step {bad[-1].step}: {in_row} in a row, {len(bad)} of the last "
        f"{count_of(len(records), 'record')} (limits {limits.nonfinite_in_row} and "
        f"{limits.nonfinite_in_100})" + last_good_checkpoint(evidence),
        facts={"step": bad[-1].step, "in_row": in_row, "in_100": len(bad)},
    )


def _faults_in_row(records: Sequence[Heartbeat], faults: Sequence[str | None]) -> int:
    """The most faults in a row; skipped steps must follow each other directly.

    All records count, not the newest only: good ones may follow before somebody looks.
    """
    most = count = 0
    before: Heartbeat | None = None
    for record, fault in zip(records, faults, strict=True):
        apart = before is not None and record.msg == "anomaly" and record.step - before.step > 1
        count = (1 if apart else count + 1) if fault else 0
        most = max(most, count)
        before = record
    return most


def last_good_checkpoint(evidence: HealthEvidence) -> str:
    """Where a stopped run can continue from, as the end of a sentence; nothing for a mere log."""
    process = evidence.process
    if process.known_good_step is not None:
        return f"; the last known good checkpoint is step {process.known_good_step}"
    if process.checkpoint_step is not None:
        return f"; the newest checkpoint is step {process.checkpoint_step}, not known to be good"
    return "" if process.trainer_alive is None else "; no checkpoint exists"


def loss_missing(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A loss that the record before had and the newest lacks, though it has the other figures.

    Some trainers leave the field out when the loss is NaN and count no NaN at all.
    """
    if len(evidence.records) < 2 or evidence.facts.objective != "language":
        return None
    before, last = evidence.records[-2:]
    known = any(value is not None for value in (last.grad_norm, last.loss_scale, last.lr))
    vanished = last.loss is None and last.finite is not False and known
    if not vanished or before.loss is None or scaler_skips([before, last])[-1] > 0:
        return None
    return Finding(
        rule="loss_missing",
        level="halt",
        sentence=f"The loss is missing at step {last.step} and was there before: some trainers "
        "leave it out when it is NaN" + last_good_checkpoint(evidence),
        facts={"step": last.step},
    )


def loss_jump(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A row of losses far above the median of the calm records before it."""
    row, calm = _jumped_row(evidence.records[-_JUMP_RECORDS:], limits)
    if not row:
        return None
    usual = median(record.loss for record in calm if record.loss is not None)
    above = [record.loss - usual for record in row if record.loss is not None]
    recovering = above[-1] <= max(above) / 2
    supported = _has_support(row, calm)
    must_stop = not recovering and (
        len(row) >= _SETTLED_IN_ROW
        or (len(row) >= _STEEP_RECORDS and _is_far(usual, above[-1], _STEEP_FACTOR))
        or (
            (supported or _is_far(usual, min(above), _FAR_FACTOR))
            and len(row) >= limits.jump_in_row
            and _is_lasting(row, calm, above)
        )
    )
    return Finding(
        rule="loss_jump",
        level="halt" if must_stop or len(row) >= limits.jump_patience else "warn",
        sentence=f"The loss {row[-1].loss:.3f} at step {row[-1].step} is {above[-1]:.2f} nats over "
        f"its median {usual:.3f}, {count_of(len(row), 'record')} in a row"
        + (", and gradients or loss scale agree" if supported else "")
        + (", coming back" if recovering else "")
        + last_good_checkpoint(evidence),
        facts={
            "step": row[-1].step, "median": usual, "above": above[-1], "in_row": len(row),
            "supported": supported, "recovering": recovering,
        },
    )  # fmt: skip


def _is_far(usual: float, above: float, factor: float) -> bool:
    """Whether a height counts by itself, without other evidence."""
    return above >= _FAR_NATS and usual + above >= factor * usual


def loss_climbing(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A level that has left the best one behind, too slowly for any record to be a jump."""
    best = evidence.reference.best_loss
    losses = [r.loss for r in evidence.records if r.loss is not None and math.isfinite(r.loss)]
    is_text = evidence.facts.bytes_per_token is not None or evidence.facts.uniform_nats is not None
    if best is None or len(losses) < MEDIAN_RECORDS or not is_text:
        return None
    height = median(losses[-MEDIAN_RECORDS:]) - best
    recovering = losses[-1] - best <= height / 2
    if height < limits.jump_nats or recovering:
        return None
    return Finding(
        rule="loss_climbing",
        level="halt" if height >= _LOST_FACTOR * limits.jump_nats else "warn",
        sentence=f"The median loss of {MEDIAN_RECORDS} records is {height:.2f} nats over the best, "
        f"{best:.3f} at step {evidence.reference.best_step}, and does not come back"
        + last_good_checkpoint(evidence),
        facts={"step": evidence.records[-1].step, "best": best, "height": height},
    )


def loss_exploded(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A loss from which no run that had learnt comes back, whatever came before.

    It needs no calm records before it, so it also works right after a resume.
    """
    known = [r for r in evidence.records if r.loss is not None and math.isfinite(r.loss)]
    if len(known) < 2 or evidence.facts.objective != "language":
        return None
    uniform = evidence.facts.uniform_nats or _USUAL_UNIFORM_NATS
    words = ""
    if known[-1].step > max(evidence.facts.warmup_steps, _FIRST_STEPS):
        words = _above_random(known, uniform)
    words = words or _far_from_the_first(evidence, known)
    if not words:
        return None
    last = known[-1]
    return Finding(
        rule="loss_exploded",
        level="halt",
        sentence=f"The loss is {last.loss:.3f} at step {last.step}, {words}"
        + last_good_checkpoint(evidence),
        facts={"step": last.step, "loss": last.loss, "uniform_nats": uniform},
    )


def _above_random(known: Sequence[Heartbeat], uniform: float) -> str:
    """Why a loss above that of random weights is no spike; empty if it may be one.

    A huge gradient with it decides at once, else the second record in a row.
    """
    before, last = known[-2:]
    loss, earlier = last.loss or 0.0, before.loss or 0.0
    if loss <= uniform:
        return ""
    above = f"above the {uniform:.2f} nats of random weights"
    if earlier <= _LEARNT_SHARE * uniform and before.grad_norm:
        factor = (last.grad_norm or 0.0) / before.grad_norm
        return f"{above}, and the gradient norm rose by {factor:.0f}" * (factor >= _EXPLODED_FACTOR)
    lowest = min((r.loss for r in known[:-2] if r.loss is not None), default=uniform)
    is_second = earlier > uniform and lowest <= _LEARNT_SHARE * uniform
    return f"the second in a row {above}" if is_second else ""


def _far_from_the_first(evidence: HealthEvidence, known: Sequence[Heartbeat]) -> str:
    """Two records at three times the only one before them; a median of more is `loss_jump`'s."""
    is_text = evidence.facts.bytes_per_token is not None or evidence.facts.uniform_nats is not None
    if len(known) != _STEEP_RECORDS + 1 or not is_text:
        return ""
    first, *rest = (record.loss or 0.0 for record in known)
    is_far = all(_is_far(first, loss - first, _STEEP_FACTOR) for loss in rest)
    return f"the second in a row over {_STEEP_FACTOR:g} times the {first:.3f} before" * is_far


def _jumped_row(
    records: Sequence[Heartbeat], limits: WatchdogLimits
) -> tuple[list[Heartbeat], list[Heartbeat]]:
    """The newest records in a row that jumped, and the calm ones that they are compared with."""
    known = [(r, r.loss) for r in records if r.loss is not None and math.isfinite(r.loss)]
    if not known or known[-1][1] <= min(loss for _, loss in known) + limits.jump_nats:
        return [], []
    calm: list[Heartbeat] = []
    row: list[Heartbeat] = []
    for record, loss in known:
        if _is_jump(loss, [r.loss for r in calm if r.loss is not None], limits):
            row.append(record)
            continue
        row = []
        calm.append(record)
        if len(calm) > MEDIAN_RECORDS:
            calm.pop(0)
    return row, calm


def _is_jump(loss: float, calm: list[float], limits: WatchdogLimits) -> bool:
    if len(calm) < 2 or loss <= min(calm) + limits.jump_nats:
        return False
    usual = median(calm)
    if loss <= usual + limits.jump_nats:
        return False
    noise = median(abs(value - usual) for value in calm)
    return loss > usual + limits.jump_noise_factor * noise


def _has_support(row: Sequence[Heartbeat], calm: Sequence[Heartbeat]) -> bool:
    """Whether gradient norms or the loss scale say the same as the loss."""
    usual = [record.grad_norm for record in calm if record.grad_norm is not None]
    highest = max((record.grad_norm or 0.0 for record in row), default=0.0)
    return _scale_fell(row, calm) or bool(usual and highest > _SUPPORT_FACTOR * median(usual))


def _scale_fell(row: Sequence[Heartbeat], calm: Sequence[Heartbeat]) -> bool:
    scales = [r.loss_scale for r in (calm[-1], *row) if r.loss_scale is not None]
    return len(scales) > 1 and scales[-1] < scales[0]


def _is_lasting(
    row: Sequence[Heartbeat], calm: Sequence[Heartbeat], above: Sequence[float]
) -> bool:
    """Whether a row of jumps is more than a short spike; see `_ROW_STEPS`."""
    high = len(row) >= _ROW_RECORDS and above[-1] >= _HIGH_SHARE * max(above)
    return high or _scale_fell(row, calm) or row[-1].step - row[0].step >= _ROW_STEPS
