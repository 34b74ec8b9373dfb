"""The slowest rank of all pods of a run, as the rule `straggler` finds that of one pod; pure.

The watchdog of a pod compares its own ranks, so that a pod all of whose ranks are slow is noticed
by the laptop alone, which sees all pods.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nsa_ops.pod.rank_evidence import RankEvidence, name_ranks, slowest_factor
from nsa_ops.pod.rules.rank_rules import explain_slowness
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.quantities import count_of, format_seconds, sentence_case

RULE = "straggler"


@dataclass(frozen=True)
class _Step:
    """The own times of all ranks in one logged step, and who took longest."""

    slowest: RankEvidence
    factor: float


def find_slow_pod(ranks: Sequence[RankEvidence], factor: float, records: int) -> Finding | None:
    """The slowest rank, where it is on one pod in each of the newest steps that all ranks logged.

    Args:
        ranks: Of all pods that answer, each with its pod.
        factor: So many times as long as the median of the other pods' ranks is slow.
        records: So many new records in a row have to agree.
    """
    known = [rank for rank in ranks if rank.recent and not rank.problem]
    if len({rank.pod for rank in known}) < 2:
        return None
    own = {rank.rank: {one.step: one.own_s for one in rank.recent} for rank in known}
    steps = sorted(set.intersection(*(set(times) for times in own.values())))[-records:]
    if len(steps) < records:
        return None
    found = [_judge_step(known, {n: times[step] for n, times in own.items()}) for step in steps]
    if len({one.slowest.pod for one in found}) > 1 or min(one.factor for one in found) < factor:
        return None
    ((number, _),) = Counter(one.slowest.rank for one in found).most_common(1)
    slow = next(rank for rank in known if rank.rank == number)
    times = median(one.factor for one in found)
    return _tell(
        slow, known, times, f"{count_of(records, 'record')} up to step {steps[-1]}", factor
    )


def _judge_step(ranks: Sequence[RankEvidence], own_s: Mapping[int, float]) -> _Step:
    """The slowest rank, against the median of those of other pods: its own may be slow as well."""
    slowest = max(ranks, key=lambda rank: own_s[rank.rank])
    others = [own_s[rank.rank] for rank in ranks if rank.pod != slowest.pod]
    return _Step(slowest, slowest_factor([*others, own_s[slowest.rank]]))


def _tell(
    slow: RankEvidence, ranks: Sequence[RankEvidence], times: float, where: str, factor: float
) -> Finding:
    others = [rank for rank in ranks if rank.pod != slow.pod]
    own_s = slow.own_s or 0.0
    usual_s = median(rank.own_s or 0.0 for rank in others)
    beside = [rank for rank in ranks if rank.pod == slow.pod and rank is not slow]
    is_whole = beside and min(rank.own_s or 0.0 for rank in beside) >= factor * usual_s
    why = explain_slowness(slow, others, own_s - usual_s)
    if is_whole:
        why = f"; all {len(beside) + 1} ranks of that pod are slow: look at its machine{why}"
    return Finding(
        rule=RULE,
        level="warn",
        sentence=f"{sentence_case(name_ranks([slow]))} takes {times:.2f} times as long for a step "
        f"as the median of the ranks of the other pods ({format_seconds(own_s)}, not "
        f"{format_seconds(usual_s)}), in each of the last {where}: all wait for it{why}",
        facts={
            "rank": slow.rank, "pod": slow.pod, "factor": round(times, 3), "own_s": own_s,
            "median_s": usual_s, "is_whole_pod": bool(is_whole),
        },
        subject=str(slow.rank),
    )  # fmt: skip
