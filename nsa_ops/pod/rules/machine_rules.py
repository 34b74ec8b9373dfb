"""Rules about speed, data, cards, and what the machine has left."""

from collections.abc import Sequence
from statistics import median

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.gpu.throttling import name_throttling
from nsa_ops.gpu.xids import explain_xid
from nsa_ops.pod.rules.loss_rules import last_good_checkpoint
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.pod.tracker import MEDIAN_RECORDS, HealthEvidence
from nsa_ops.quantities import count_of, format_bytes

#: Growth below this many MiB is no creep: caches fill.
_CREEP_MIN_MIB = 512
_CONSISTENT_RECORDS = 3
#: A data share of the step time above this explains a slow run.
_DATA_SHARE = 0.3
_ANOTHER_POD = "; continue on another pod: `nsa-ops resume --pod OTHER`"


def throughput_low(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Slower than the run's own median for the whole window, or that median than the profile's."""
    usual = evidence.reference.tokens_per_s
    records = [r for r in evidence.records if r.tokens_per_s is not None and r.msg == "progress"]
    if not usual or len(records) < 2:
        return None
    share = (records[-1].tokens_per_s or 0.0) / usual
    before = " from before" if evidence.reference.is_from_before else ""
    for stage, fraction, window_s in (
        (1, limits.throughput_fraction / 2, limits.throughput_window_s / 2),
        (0, limits.throughput_fraction, limits.throughput_window_s),
    ):
        slow_s = _slow_for_s(records, fraction * usual)
        if slow_s >= window_s:
            return Finding(
                rule="throughput_low",
                level="warn",
                sentence=f"The throughput is {share:.0%} of the run's own median{before} "
                f"({usual:.4g} tokens/s), for {slow_s / 60:.0f} min; {_cause(records[-1])}",
                facts={"share": share, "slow_s": slow_s, "median": usual},
                stage=stage,
            )
    return _below_expected(usual, records, limits)


def _below_expected(
    usual: float, records: Sequence[Heartbeat], limits: WatchdogLimits
) -> Finding | None:
    """The run's own median is below what its profile expects of its recipe."""
    expected = limits.expected_tokens_per_s
    if len(records) < MEDIAN_RECORDS or usual >= limits.expected_fraction * expected:
        return None
    share = usual / expected
    return Finding(
        rule="throughput_low",
        level="warn",
        sentence=f"The run's own median of {usual:.4g} tokens/s is {share:.0%} of the "
        f"{expected:.4g} that its profile expects of this recipe; {_cause(records[-1])}",
        facts={"share": share, "median": usual, "expected": expected},
        subject="profile",
    )


def _slow_for_s(records: Sequence[Heartbeat], limit: float) -> float:
    """Seconds that the newest records have been below the limit; a record covers what precedes."""
    start = len(records)
    while start > 1 and (records[start - 1].tokens_per_s or 0.0) < limit:
        start -= 1
    return records[-1].ts - records[start - 1].ts


def _cause(record: Heartbeat) -> str:
    if record.data_s is not None and record.step_s:
        share = record.data_s / record.step_s
        if share > _DATA_SHARE:
            return f"waiting for data is {share:.0%} of a step: look at the loader and its disk"
    if reasons := name_throttling(record.throttle):
        return f"the clocks are throttled ({reasons}): look at power and temperature"
    known = record.data_s is not None or record.dt_fetch_s is not None
    return (
        "the data loader is not the cause: look for another process on the card, and at the clocks"
        if known
        else "the records do not show whether data, clocks or another process is the cause"
    )


def data_slow(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Batches that come late again and again, or one that came very late."""
    known = [r for r in evidence.records if r.dt_fetch_s is not None or r.fetch_p95_ms is not None]
    newest = known[-_CONSISTENT_RECORDS:]
    if not newest:
        return None
    fetch_s = [record.dt_fetch_s or 0.0 for record in newest]
    p95_ms = [record.fetch_p95_ms or 0.0 for record in newest]
    full = len(newest) == _CONSISTENT_RECORDS
    if fetch_s[-1] > limits.data_wait_warn_s:
        words = f"one batch took {fetch_s[-1]:.0f} s (limit {limits.data_wait_warn_s:g} s)"
    elif full and min(fetch_s) > limits.fetch_warn_s:
        words = f"batches take {median(fetch_s):.1f} s (limit {limits.fetch_warn_s:g} s)"
    elif full and min(p95_ms) > limits.fetch_p95_warn_ms:
        words = f"the fetch p95 is {p95_ms[-1]:.0f} ms (limit {limits.fetch_p95_warn_ms:g} ms)"
    else:
        return None
    return Finding(
        rule="data_slow",
        level="warn",
        sentence=f"Batches arrive slowly at step {newest[-1].step}: {words}",
        facts={"step": newest[-1].step, "dt_fetch_s": fetch_s[-1], "fetch_p95_ms": p95_ms[-1]},
    )


def memory_creep(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Memory in use that has grown since the first records and still grows."""
    for name, label, usual in (
        ("gpu_mem_alloc", "GPU memory", evidence.reference.gpu_memory_mib),
        ("host_rss_mib", "host memory of the trainer", evidence.reference.host_memory_mib),
    ):
        values = [v for r in evidence.records if (v := getattr(r, name)) is not None]
        if usual is None or len(values) < 2 * MEDIAN_RECORDS:
            continue
        now = median(values[-MEDIAN_RECORDS:])
        earlier = median(values[-2 * MEDIAN_RECORDS : -MEDIAN_RECORDS])
        grown = now - usual
        if grown > max(_CREEP_MIN_MIB, limits.memory_creep_fraction * usual) and now > earlier:
            return Finding(
                rule="memory_creep",
                level="warn",
                sentence=f"The {label} has grown from {usual:.0f} to {now:.0f} MiB and still grows",
                facts={"name": name, "first_mib": usual, "now_mib": now},
                subject=name,
            )
    return None


def disk_low(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """No room for the next checkpoints."""
    free, size = evidence.machine.disk_free_bytes, evidence.machine.checkpoint_bytes
    if free is None or not size or free >= limits.disk_checkpoints * size:
        return None
    return Finding(
        rule="disk_low",
        level="warn",
        sentence=f"The disk has {format_bytes(free)} free, less than {limits.disk_checkpoints:g} "
        f"checkpoints of {format_bytes(size)}",
        facts={"free_bytes": free, "checkpoint_bytes": size},
    )


def host_memory_high(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """The pod's memory is nearly used up; the kernel then kills the largest process."""
    used = evidence.machine.host_memory_fraction
    if used is None or used <= limits.host_memory_fraction:
        return None
    return Finding(
        rule="host_memory_high",
        level="warn",
        sentence=f"{used:.0%} of the pod's memory is in use (limit "
        f"{limits.host_memory_fraction:.0%}): the kernel may kill the trainer",
        facts={"used_fraction": used},
    )


def card_lost(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A card that was there when the attempt began, and is not any more."""
    cards = evidence.machine.cards
    if cards is None or not cards.lost:
        return None
    return Finding(
        rule="card_lost",
        level="halt",
        sentence=f"{', '.join(cards.lost)} of {count_of(cards.num_cards, 'card')} is lost"
        + last_good_checkpoint(evidence)
        + _ANOTHER_POD,
        facts={"lost": cards.lost},
        subject=",".join(cards.lost),
    )


def card_ecc(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Memory errors that could not be corrected: weights or gradients may be wrong."""
    cards = evidence.machine.cards
    if cards is None or not cards.ecc:
        return None
    known = ", ".join(f"{count} on {label}" for label, count in sorted(cards.ecc.items()))
    return Finding(
        rule="card_ecc",
        level="halt",
        sentence=f"New uncorrected memory errors: {known}"
        + last_good_checkpoint(evidence)
        + _ANOTHER_POD,
        facts={"ecc": cards.ecc},
        subject=known,
    )


def card_xid(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Driver errors; those after which a card needs a reset or service halt."""
    cards = evidence.machine.cards
    if cards is None or not cards.xids:
        return None
    worst = min(cards.xids, key=lambda xid: explain_xid(xid.code).status != "fail")
    known = explain_xid(worst.code)
    return Finding(
        rule="card_xid",
        level="halt" if known.status == "fail" else "warn",
        sentence=f"Xid {worst.code} on {worst.bus or 'a card'}: {known.meaning}. {known.advice}",
        facts={"xids": [{"code": one.code, "bus": one.bus} for one in cards.xids]},
        subject=",".join(sorted({f"{one.code}@{one.bus}" for one in cards.xids})),
    )


def card_unread(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A tool that does not answer: the driver may hang, and the state of the cards is unknown."""
    cards = evidence.machine.cards
    if cards is None or not cards.problem:
        return None
    return Finding(
        rule="card_unread",
        level="warn",
        sentence=f"The cards cannot be read: {cards.problem}",
        facts={"problem": cards.problem},
    )
