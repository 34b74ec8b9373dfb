"""Rules about speed, data, cards, and what the machine has left.

What each rank has of its own, its data, memory and clocks, is judged for every rank of the pod.
"""

from collections.abc import Sequence
from statistics import median

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.gpu.xids import explain_xid
from nsa_ops.pod.rank_evidence import KEPT_DATA, DataTimes, MemoryGrowth, RankEvidence, name_ranks
from nsa_ops.pod.rank_tracker import MEDIAN_RECORDS
from nsa_ops.pod.rules.loss_rules import last_good_checkpoint
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.pod.tracker import HealthEvidence
from nsa_ops.quantities import count_of, format_bytes

#: Growth below this many MiB is no creep: caches fill.
_CREEP_MIN_MIB = 512
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
                sentence=f"The throughput is {100 * share:.0f} % of the run's own median{before} "
                f"({usual:.4g} {evidence.facts.speed_unit}), for {slow_s / 60:.0f} min; "
                f"{_cause(evidence)}",
                facts={"share": share, "slow_s": slow_s, "median": usual},
                stage=stage,
            )
    return _below_expected(usual, len(records), evidence, limits)


def _below_expected(
    usual: float, num_records: int, evidence: HealthEvidence, limits: WatchdogLimits
) -> Finding | None:
    """The run's own median is below what its profile expects of its recipe."""
    expected = limits.expected_tokens_per_s
    if num_records < MEDIAN_RECORDS or not 0 <= usual < limits.expected_fraction * expected:
        return None
    share = usual / expected
    return Finding(
        rule="throughput_low",
        level="warn",
        sentence=f"The run's own median of {usual:.4g} tokens/s is {100 * share:.0f} % of the "
        f"{expected:.4g} that its profile expects of this recipe; {_cause(evidence)}",
        facts={"share": share, "median": usual, "expected": expected},
        subject="profile",
    )


def _slow_for_s(records: Sequence[Heartbeat], limit: float) -> float:
    """Seconds that the newest records have been below the limit; a record covers what precedes."""
    start = len(records)
    while start > 1 and (records[start - 1].tokens_per_s or 0.0) < limit:
        start -= 1
    return records[-1].ts - records[start - 1].ts


def _cause(evidence: HealthEvidence) -> str:
    """What slows the run down: the data of a rank, or clocks; each rank waits for the slowest."""
    ranks = evidence.every_rank
    late = max(ranks, key=_data_share, default=None)
    if late is not None and _data_share(late) > _DATA_SHARE:
        who, share = _of(evidence, [late]), _data_share(late)
        waiting = f"waiting for data{who} is {100 * share:.0f} % of a step"
        return f"{waiting}: look at the loader and its disk"
    throttled = [rank for rank in ranks if rank.held_back_by]
    if throttled:
        reasons = ", ".join(dict.fromkeys(rank.held_back_by for rank in throttled))
        who = _of(evidence, throttled)
        return f"the clocks{who} are throttled ({reasons}): look at power and temperature"
    return (
        "the data loader is not the cause: look for another process on the card, and at the clocks"
        if any(rank.data for rank in ranks)
        else "the records do not show whether data, clocks or another process is the cause"
    )


def _data_share(rank: RankEvidence) -> float:
    """Part of the newest step in which a rank waited for its batch; 0 if unknown."""
    return rank.data[-1].share or 0.0 if rank.data else 0.0


def _of(evidence: HealthEvidence, ranks: Sequence[RankEvidence]) -> str:
    """` of rank 3`; empty where the run has one rank."""
    return f" of {name_ranks(ranks)}" if evidence.ranks else ""


def _likewise(ranks: Sequence[RankEvidence], named: RankEvidence) -> str:
    """The ranks beside the one that is named, to end a sentence with."""
    others = [rank for rank in ranks if rank is not named]
    return f"; likewise on {name_ranks(others)}" if others else ""


def data_slow(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Batches that come late again and again, or one that came very late, on any rank."""
    late = [
        (words, rank)
        for rank in evidence.every_rank
        if (words := _describe_late_data(rank.data, limits))
    ]
    if not late:
        return None
    words, worst = max(late, key=lambda found: found[1].data[-1].fetch_s or 0.0)
    newest = worst.data[-1]
    also = _likewise([rank for _, rank in late], worst)
    return Finding(
        rule="data_slow",
        level="warn",
        sentence=f"Batches{_of(evidence, [worst])} arrive slowly at step {newest.step}: {words}"
        + also,
        facts={
            "step": newest.step, "dt_fetch_s": newest.fetch_s or 0.0,
            "fetch_p95_ms": newest.p95_ms or 0.0, "ranks": [rank.rank for _, rank in late],
        },
    )  # fmt: skip


def _describe_late_data(records: Sequence[DataTimes], limits: WatchdogLimits) -> str:
    """What is late about the data of a rank; empty if nothing is."""
    if not records:
        return ""
    fetch_s = [record.fetch_s or 0.0 for record in records]
    p95_ms = [record.p95_ms or 0.0 for record in records]
    is_full = len(records) == KEPT_DATA
    if fetch_s[-1] > limits.data_wait_warn_s:
        return f"one batch took {fetch_s[-1]:.0f} s (limit {limits.data_wait_warn_s:g} s)"
    if is_full and min(fetch_s) > limits.fetch_warn_s:
        return f"batches take {median(fetch_s):.1f} s (limit {limits.fetch_warn_s:g} s)"
    if is_full and min(p95_ms) > limits.fetch_p95_warn_ms:
        return f"the fetch p95 is {p95_ms[-1]:.0f} ms (limit {limits.fetch_p95_warn_ms:g} ms)"
    return ""


def memory_creep(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """Memory in use that has grown since the first records and still grows, on any rank."""
    for name, label in (("gpu_growth", "GPU memory"), ("host_growth", "host memory")):
        growing = [
            (growth, rank)
            for rank in evidence.every_rank
            if (growth := getattr(rank, name)) is not None and _is_creeping(growth, limits)
        ]
        if growing:
            return _tell_creep(evidence, name, label, growing)
    return None


def _is_creeping(growth: MemoryGrowth, limits: WatchdogLimits) -> bool:
    least = max(_CREEP_MIN_MIB, limits.memory_creep_fraction * growth.first_mib)
    return growth.now_mib - growth.first_mib > least and growth.now_mib > growth.earlier_mib


def _tell_creep(
    evidence: HealthEvidence,
    name: str,
    label: str,
    growing: Sequence[tuple[MemoryGrowth, RankEvidence]],
) -> Finding:
    most, worst = max(growing, key=lambda found: found[0].now_mib - found[0].first_mib)
    also = _likewise([rank for _, rank in growing], worst)
    who = _of(evidence, [worst]) or " of the trainer"
    return Finding(
        rule="memory_creep",
        level="warn",
        sentence=f"The {label}{who} has grown from {most.first_mib:.0f} to {most.now_mib:.0f} MiB "
        f"and still grows{also}",
        facts={
            "name": name, "first_mib": most.first_mib, "now_mib": most.now_mib,
            "ranks": [rank.rank for _, rank in growing],
        },
        subject=f"{name}{_of(evidence, [worst])}",
    )  # fmt: skip


def card_memory_high(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A card whose tensors have filled it nearly once: a longer batch runs out of memory."""
    known = [
        (rank.gpu_mem_peak / rank.gpu_mem_total, rank)
        for rank in evidence.every_rank
        if rank.gpu_mem_peak is not None and rank.gpu_mem_total
    ]
    full = [(share, rank) for share, rank in known if share > limits.card_memory_fraction]
    if not full:
        return None
    share, worst = max(full, key=lambda found: found[0])
    also = _likewise([rank for _, rank in full], worst)
    card = f"The card{_of(evidence, [worst])}"
    return Finding(
        rule="card_memory_high",
        level="warn",
        sentence=f"{card} had {worst.gpu_mem_peak:,} of {worst.gpu_mem_total:,} MiB in tensors at "
        f"its peak ({100 * share:.1f} %, limit {100 * limits.card_memory_fraction:.0f} %): "
        f"a step that needs more runs out of memory{also}",
        facts={"share": share, "ranks": [rank.rank for _, rank in full]},
        subject=",".join(str(rank.rank) for _, rank in full) if evidence.ranks else "",
    )


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
        sentence=f"{100 * used:.0f} % of the pod's memory is in use (limit "
        f"{100 * limits.host_memory_fraction:.0f} %): the kernel may kill the trainer",
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
