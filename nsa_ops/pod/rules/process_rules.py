"""Rules about the process: does it live, does anything in it move, does the loop move?"""

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.heartbeat import Phase
from nsa_ops.pod.rules.patience import patience_of, usual_step_s
from nsa_ops.pod.rules.rank_rules import ranks_silent, ranks_stalled
from nsa_ops.pod.rules.verdict import Finding
from nsa_ops.pod.tracker import HealthEvidence

_GOOD_ENDS = {TrainerExit.FINISHED, TrainerExit.HALTED, TrainerExit.RESUMABLE}


def process_gone(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """A trainer that is gone without exit.json, or that ended on an error."""
    record = evidence.process.exit
    if record is not None:
        if record.code in _GOOD_ENDS:
            return None
        return Finding(
            rule="process_gone",
            level="halt",
            sentence=f"The run ended with code {record.code} at step {record.step}: "
            f"{record.reason}",
            facts={"code": record.code, "step": record.step},
        )
    if evidence.process.trainer_alive is False:
        step = evidence.last.step if evidence.last else 0
        return Finding(
            rule="process_gone",
            level="halt",
            sentence=f"The trainer is gone after step {step} and left no exit record; "
            "see the end of training.log",
            facts={"step": step},
        )
    return None


def heartbeat_stale(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """No thread of the process moves; before the first beat, the process has its own limit."""
    if evidence.process.exit is not None or evidence.process.trainer_alive is False:
        return None
    if evidence.ranks:
        return ranks_silent(evidence, limits)
    if evidence.last is None:
        return _no_first_beat(evidence, limits)
    age_s = evidence.alive_age_s
    if age_s <= limits.stale_warn_s:
        return None
    return Finding(
        rule="heartbeat_stale",
        level="halt" if age_s > limits.stale_halt_s else "warn",
        sentence=f"No heartbeat for {age_s:.0f} s (limit {limits.stale_halt_s:.0f} s), last one at "
        f"step {evidence.last.step} in phase {evidence.last.phase}: the process is stopped, "
        "blocked in the kernel, or cannot write",
        facts={"age_s": round(age_s, 1), "step": evidence.last.step, "phase": evidence.last.phase},
    )


def _no_first_beat(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    age_s = evidence.process.age_s
    if evidence.process.trainer_alive is None or age_s <= limits.stale_halt_s:
        return None
    return Finding(
        rule="heartbeat_stale",
        level="halt" if age_s > limits.first_beat_limit_s else "warn",
        sentence=f"The trainer started {age_s:.0f} s ago and has not written a heartbeat "
        f"(limit {limits.first_beat_limit_s:.0f} s)",
        facts={"age_s": round(age_s, 1)},
    )


def stall(evidence: HealthEvidence, limits: WatchdogLimits) -> Finding | None:
    """The loop does not move although the process lives; patience depends on the phase."""
    last = evidence.last
    if evidence.process.exit is not None or evidence.process.trainer_alive is False:
        return None
    if evidence.ranks:
        return ranks_stalled(evidence, limits)
    if last is None:
        return None
    warn_s, halt_s = patience_s(evidence, limits)
    still_s = evidence.still_s
    if still_s <= warn_s:
        return None
    return Finding(
        rule="stall",
        level="halt" if halt_s is not None and still_s > halt_s else "warn",
        sentence=f"Nothing has moved for {still_s:.0f} s in phase {last.phase} at step {last.step}"
        + (f" (limit {halt_s:.0f} s)" if halt_s is not None else "")
        + "; `nsa-ops stack` shows where it is stuck",
        facts={
            "still_s": round(still_s, 1), "limit_s": halt_s, "phase": last.phase, "step": last.step,
        },
    )  # fmt: skip


def patience_s(evidence: HealthEvidence, limits: WatchdogLimits) -> tuple[float, float | None]:
    """Seconds without movement that warn and that halt in the current phase."""
    last = evidence.last
    phase: Phase = last.phase if last else "init"
    deadline_s = (last.phase_deadline_s if last else None) or 0.0
    before_s = evidence.phase_durations_s.get(phase, 0.0)
    return patience_of(phase, deadline_s, before_s, usual_step_s(evidence), limits)
