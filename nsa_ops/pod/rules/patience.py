"""How long a phase may go without movement before the watchdog warns, and before it halts."""

from statistics import median

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Phase
from nsa_ops.pod.tracker import HealthEvidence

_SLOWEST_RECORDS = 50


def usual_step_s(evidence: HealthEvidence) -> float:
    """Median time of the newest steps; 0 before the first."""
    times = [r.step_s for r in evidence.records[-_SLOWEST_RECORDS:] if r.step_s is not None]
    return median(times or [0.0])


def patience_of(
    phase: Phase, deadline_s: float, before_s: float, step_s: float, limits: WatchdogLimits
) -> tuple[float, float | None]:
    """Seconds without movement that warn and that halt.

    A deadline that the trainer gives for its phase (0: none) extends the limit. Staging data has no
    limit of its own: it takes hours for a large data set, so without a deadline it only warns.
    `before_s` is how long the last phase of the kind took (0: there was none).
    """
    if phase == "data_wait":
        return limits.data_wait_warn_s, max(limits.data_wait_halt_s, deadline_s)
    if phase == "data":
        return max(limits.compile_limit_s, deadline_s), deadline_s or None
    if phase in {"init", "compile"}:
        limit_s = limits.compile_limit_s
    elif phase == "train":
        limit_s = max(limits.stall_min_s, limits.stall_step_factor * step_s)
    else:
        limit_s = max(limits.phase_limit_s, limits.phase_factor * before_s)
    limit_s = max(limit_s, deadline_s)
    return limit_s, limit_s
