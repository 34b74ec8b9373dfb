"""Evidence for the rules, made in a line."""

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, RunFacts, Tracker

LIMITS = WatchdogLimits()
FACTS = RunFacts(total_steps=50_000, warmup_steps=10, bytes_per_token=4.0)
ALIVE = ProcessEvidence(trainer_alive=True, age_s=100.0, checkpoint_step=500)


def beat(step=1, msg: str = "progress", **fields) -> Heartbeat:
    values = {
        "run_id": "r", "attempt": 1, "rank": 0, "pid": 1, "ts": 10.0 * step, "iso": "",
        "phase": "train", "alive_seq": step, "progress_seq": step, "step": step, "loss": 3.0,
        "lr": 1e-3, "grad_norm": 1.0, "step_s": 1.0,
    }  # fmt: skip
    return Heartbeat(**{**values, "msg": msg, **fields})


def beats(count, first: int = 1, every: int = 1, **fields):
    return [beat(step, **fields) for step in range(first, first + count * every, every)]


def judged(
    records, *, after_s: float = 0.0, facts=FACTS, process=ALIVE, limits=LIMITS, **machine
) -> Verdict:
    """The verdict `after_s` seconds after the last of the beats was seen."""
    tracker = Tracker(facts, 1)
    tracker.feed(records)
    now_s = (records[-1].ts if records else 0.0) + after_s
    return judge(tracker.evidence(now_s, process, MachineEvidence(**machine)), limits)


def found(verdict):
    return {finding.rule: finding.level for finding in verdict.findings}
