"""Rules about several ranks: which one is silent, which one the others wait for, which is slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.rank_evidence import (
    OddRanks,
    RankEvidence,
    find_odd,
    name_ranks,
    slowest_factor,
)
from nsa_ops.pod.rules.patience import patience_of, usual_step_s
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.pod.tracker import HealthEvidence
from nsa_ops.quantities import count_of, sentence_case

#: A wait for data above this share of what a rank takes longer explains it.
_DATA_SHARE = 0.5
_STACKS = "; `nsa-ops stack` shows where each is stuck"


def ranks_silent(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """`heartbeat_stale` where a run has several ranks: it names those that write no heartbeat."""
    ranks = [rank for rank in evidence.ranks if not rank.problem]
    silent = [rank for rank in ranks if rank.is_silent(limits.stale_warn_s)]
    if silent:
        return _silent(silent, ranks, limits)
    unborn = [rank for rank in ranks if rank.msg is None]
    age_s = evidence.process.age_s
    if not unborn or evidence.process.trainer_alive is None or age_s <= limits.stale_halt_s:
        return None
    others = len(ranks) - len(unborn)
    rest = f", and {count_of(others, 'other rank')} of this pod have" if others else ""
    return Finding(
        rule="heartbeat_stale",
        level="halt" if age_s > limits.first_beat_limit_s else "warn",
        sentence=f"The trainer started {age_s:.0f} s ago, and {name_ranks(unborn)} "
        f"{_verb(unborn, 'has', 'have')} not written a heartbeat "
        f"(limit {limits.first_beat_limit_s:.0f} s){rest}",
        facts={"age_s": round(age_s, 1), "ranks": _numbers(unborn)},
        subject=_subject(unborn),
    )


def _silent(
    silent: list[RankEvidence], ranks: list[RankEvidence], limits: WatchdogLimits
) -> Finding:
    worst = max(silent, key=lambda rank: rank.beat_age_s or 0.0)
    age_s = worst.beat_age_s or 0.0
    others = [rank for rank in ranks if rank not in silent and rank.msg is not None]
    ended = [rank for rank in others if rank.msg == "end"]
    beating = len(others) - len(ended)
    other = f", {name_ranks(ended)} {_verb(ended, 'has', 'have')} ended" if ended else ""
    if beating:
        writes = "writes its own" if beating == 1 else "write theirs"
        other = f", while {count_of(beating, 'other rank')} of this pod {writes}"
    return Finding(
        rule="heartbeat_stale",
        level="halt" if age_s > limits.stale_halt_s else "warn",
        sentence=f"No heartbeat of {name_ranks(silent)} for {age_s:.0f} s "
        f"(limit {limits.stale_halt_s:.0f} s), last one at step {worst.step} in phase "
        f"{worst.phase}{other}: {_verb(silent, 'its process is', 'their processes are')} stopped, "
        "blocked in the kernel, or cannot write",
        facts={
            "age_s": round(age_s, 1), "step": worst.step, "phase": worst.phase,
            "ranks": _numbers(silent),
        },
        subject=_subject(silent),
    )  # fmt: skip


def ranks_stalled(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """`stall` where a run has several ranks: it names the one that the others wait for.

    A rank that waits for another one moves as little as that, so only the odd ranks are judged,
    each by the patience of its own phase. Where all are at the same place, all are.
    """
    judged = judge_movement(evidence, limits)
    if judged is None or judged.still_s <= judged.warn_s:
        return None
    odd, worst, halt_s = judged.odd, judged.worst, judged.limit_s
    limit = f" (limit {halt_s:.0f} s)" if halt_s is not None else ""
    who = odd.ranks if odd else judged.known
    told = _tell_odd(odd, worst, limit) if odd else _tell_all(who, worst, limit)
    if odd is None and evidence.facts.num_pods > 1:
        told += "; it may be one of another pod that they wait for: `nsa-ops status` shows all"
    return Finding(
        rule="stall",
        level="halt" if halt_s is not None and judged.still_s > halt_s else "warn",
        sentence=told,
        facts={
            "still_s": round(judged.still_s, 1), "limit_s": halt_s, "phase": worst.phase,
            "step": worst.step, "ranks": _numbers(who), "by": odd.by if odd else "all",
        },
        subject=_subject(who),
    )  # fmt: skip


@dataclass(frozen=True)
class JudgedMovement:
    """The ranks by whose movement the run is judged.

    Attributes:
        known: All ranks that write heartbeats.
        odd: Those that the others wait for; None where all are at the same place.
        worst: The one that is judged.
        still_s: Seconds since any rank moved; one that has ended does not count.
        warn_s: Seconds after which the watchdog warns, by the phase of the judged rank.
        limit_s: Seconds after which it halts; None where it only warns.
    """

    known: tuple[RankEvidence, ...]
    odd: OddRanks | None
    worst: RankEvidence
    still_s: float
    warn_s: float
    limit_s: float | None


def judge_movement(evidence: HealthEvidence, limits: WatchdogLimits) -> JudgedMovement | None:
    """Which of several ranks is judged, and by which patience; None where no rank can move."""
    known = [rank for rank in evidence.ranks if rank.still_s is not None and not rank.problem]
    living = [rank for rank in known if rank.msg != "end"]
    if not living:
        return None
    odd = find_odd(known, limits.stale_warn_s)
    # One that has ended never moves again: those that wait for it are judged.
    judged = odd.ranks if odd and odd.by != "end" else living
    worst = max(judged, key=lambda rank: rank.still_s or 0.0)
    still_s = min(rank.still_s or 0.0 for rank in living)
    warn_s, limit_s = _patience(worst, evidence, limits)
    if odd is None and evidence.facts.num_pods > 1 and limit_s is not None:
        # They may wait for a rank of another pod, whose own watchdog gives it this long.
        limit_s = max(limit_s, limits.data_wait_halt_s, limits.phase_limit_s) + limits.stall_min_s
    return JudgedMovement(tuple(known), odd, worst, still_s, warn_s, limit_s)


def _patience(
    rank: RankEvidence, evidence: HealthEvidence, limits: WatchdogLimits
) -> tuple[float, float | None]:
    """Of its phase; a step warns before the ranks that wait for it give up."""
    step_s, phase = usual_step_s(evidence), rank.phase or "init"
    deadline_s = rank.phase_deadline_s or 0.0
    warn_s, halt_s = patience_of(phase, deadline_s, rank.phase_before_s, step_s, limits)
    timeout_s = evidence.facts.collective_timeout_s
    if phase == "train" and timeout_s is not None and step_s > 0:
        warn_s = min(warn_s, max(timeout_s, limits.stall_step_factor * step_s) / 2)
    return warn_s, halt_s


def _tell_odd(odd: OddRanks, worst: RankEvidence, limit: str) -> str:
    names, still_s = name_ranks(odd.ranks), worst.still_s or 0
    place = f"phase {worst.phase} at step {worst.step}{limit}"
    if odd.by == "end":
        has, wait = _verb(odd.others, "has", "have"), _verb(odd.others, "it waits", "they wait")
        return sentence_case(
            f"{names} ended at step {odd.ranks[0].step}, and {name_ranks(odd.others)} {has} not "
            f"moved for {still_s:.0f} s in {place}: {wait} for {_it(odd.ranks)}; the ranks did not "
            "get equally many batches, or one of them failed"
        )
    be = _verb(odd.ranks, "is", "are")
    where = {
        "silence": f" and written no heartbeat for {worst.beat_age_s or 0:.0f} s",
        "step": f" and {be} {count_of(odd.others[0].step - worst.step, 'step')} behind",
        "micro_step": f" and {be} at micro-batch {worst.micro_step} of it",
    }.get(odd.by, "")
    has = _verb(odd.ranks, "has", "have")
    return sentence_case(
        f"{names} {has} not moved for {still_s:.0f} s in {place}{where}; {_tell_others(odd)}"
        f"{_STACKS}"
    )


def _tell_others(odd: OddRanks) -> str:
    """Who waits for the odd ranks, and where; or that the others have ended."""
    if not odd.waiting:
        return f"{name_ranks(odd.others)} {_verb(odd.others, 'has', 'have')} ended"
    there, wait = odd.waiting[0], _verb(odd.waiting, "waits", "wait")
    place = f"phase {there.phase} at step {there.step}"
    return f"{name_ranks(odd.waiting)} {wait} for {_it(odd.ranks)} in {place}"


def _tell_all(ranks: Sequence[RankEvidence], worst: RankEvidence, limit: str) -> str:
    has, place = _verb(ranks, "has", "have"), f"phase {worst.phase} at step {worst.step}"
    if len(ranks) == 1:
        who, why = f"{name_ranks(ranks)}, the only one of this pod,", ""
    else:
        who = f"all {len(ranks)} ranks of this pod"
        why = ": they wait in the same place, as for a collective that never completes"
    return sentence_case(
        f"{who} {has} not moved for {worst.still_s or 0:.0f} s in {place}{limit}{why}{_STACKS}"
    )


def straggler(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """One rank that takes longer than the others, step after step: all others wait for it.

    It is the slowest in each of the newest steps that all ranks have records of.
    """
    known = {rank.rank: rank for rank in evidence.ranks if rank.recent and not rank.problem}
    if len(known) < 2:
        return None
    own = {number: {one.step: one.own_s for one in r.recent} for number, r in known.items()}
    common = sorted(set.intersection(*(set(steps) for steps in own.values())))
    newest = common[-limits.straggler_records :]
    if len(newest) < limits.straggler_records:
        return None
    slowest = {max(own, key=lambda number: own[number][step]) for step in newest}
    factors = [slowest_factor([steps[step] for steps in own.values()]) for step in newest]
    if len(slowest) > 1 or min(factors) < limits.straggler_factor:
        return None
    return _tell_straggler(known.pop(slowest.pop()), list(known.values()), median(factors), newest)


def _tell_straggler(
    slow: RankEvidence, others: list[RankEvidence], factor: float, steps: list[int]
) -> Finding:
    usual_s = median(other.own_s or 0.0 for other in others)
    own_s = slow.own_s or 0.0
    return Finding(
        rule="straggler",
        level="warn",
        sentence=f"Rank {slow.rank} takes {factor:.2f} times as long for a step as the median of "
        f"the other ranks ({own_s:.3g} s, not {usual_s:.3g} s), in each of the last "
        f"{count_of(len(steps), 'record')} up to step {steps[-1]}: all wait for it"
        + explain_slowness(slow, others, own_s - usual_s),
        facts={
            "rank": slow.rank, "factor": round(factor, 3), "own_s": own_s, "median_s": usual_s,
            "temp_c": slow.temp_c, "throttle": slow.throttle,
        },
        subject=str(slow.rank),
    )  # fmt: skip


def explain_slowness(slow: RankEvidence, others: Sequence[RankEvidence], longer_s: float) -> str:
    """What is known of the data and the card of a slow rank, to end a sentence with.

    Args:
        slow: The rank.
        others: Those that it is compared with.
        longer_s: So much longer it takes.
    """
    data_s = slow.data_s or 0.0
    usual_data_s = median(other.data_s or 0.0 for other in others)
    if data_s - usual_data_s > _DATA_SHARE * longer_s > 0:
        return f"; it waits {data_s:.3g} s of them for its batch: look at its loader and its disk"
    parts = []
    if slow.temp_c is not None:
        temperatures = [other.temp_c for other in others if other.temp_c is not None]
        beside = f" (the others {median(temperatures):.0f})" if temperatures else ""
        parts.append(f"its card is at {slow.temp_c:.0f} degrees C{beside}")
    if slow.held_back_by:
        parts.append(f"its clocks are throttled ({slow.held_back_by})")
    elif slow.throttle is not None:
        parts.append("its clocks are not throttled")
    return f"; {', '.join(parts)}" if parts else ""


def _verb(ranks: Sequence[RankEvidence], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _it(ranks: Sequence[RankEvidence]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _numbers(ranks: Sequence[RankEvidence]) -> list[int]:
    return [rank.rank for rank in ranks]


def _subject(ranks: Sequence[RankEvidence]) -> str:
    return ",".join(str(rank.rank) for rank in ranks)
