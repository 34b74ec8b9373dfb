"""Play a log to the judge record by record: what would the watchdog have said, and when?"""

from dataclasses import dataclass, field

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_ops.health.foreign_reader import ForeignLog
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.rules.verdict import Finding, Level
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, Tracker, is_record


@dataclass(frozen=True)
class Alarm:
    """The first time that a rule gave a level, or a worse stage of it.

    Attributes:
        record: Index of the record, from 0; the number of records for the end of the log.
        step: Step of the record.
        finding: What the rule said.
    """

    record: int
    step: int
    finding: Finding


@dataclass
class Replay:
    """Alarms of one log.

    Attributes:
        num_records: Records that were judged.
        alarms: The first of each rule and level, in order.
        num_findings: On how many records each rule found something.
        last_steps: The step of the last of them.
        ending: How the log says that the run was stopped from outside; empty if it does not.
    """

    num_records: int = 0
    alarms: list[Alarm] = field(default_factory=list)
    num_findings: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)
    ending: str = ""

    def first(self, level: Level) -> Alarm | None:
        """The first alarm of a level."""
        return next((alarm for alarm in self.alarms if alarm.finding.level == level), None)

    def take(self, findings: list[Finding], record: int, step: int) -> None:
        """Note what is new among findings."""
        known = {_identity(alarm.finding) for alarm in self.alarms}
        for finding in findings:
            self.num_findings[finding.rule] = self.num_findings.get(finding.rule, 0) + 1
            self.last_steps[finding.rule] = step
            if _identity(finding) not in known:
                self.alarms.append(Alarm(record, step, finding))


def _identity(finding: Finding) -> tuple[str, str, int]:
    return finding.rule, finding.level, finding.stage


def replay(log: ForeignLog, limits: WatchdogLimits) -> Replay:
    """Judge after every record, as a watchdog that is never late would."""
    told = Replay()
    tracker = Tracker(log.facts, attempt=1)
    for index, beat in enumerate(log.beats):
        if beat.attempt != tracker.attempt:
            tracker = Tracker(log.facts, beat.attempt, tracker.best_rate)
        tracker.feed([beat])
        evidence = tracker.evidence(beat.ts, ProcessEvidence(), MachineEvidence())
        told.take(judge(evidence, limits).findings, index, beat.step)
    told.num_records = sum(is_record(beat) for beat in log.beats)
    if log.ending == "stopped":
        step = log.beats[-1].step if log.beats else 0
        told.ending = f"stopped from outside after step {step}: {log.error}"
    elif log.ending:
        _judge_end(log, tracker, limits, told)
    return told


def _judge_end(log: ForeignLog, tracker: Tracker, limits: WatchdogLimits, told: Replay) -> None:
    step, at_s = (log.beats[-1].step, log.beats[-1].ts) if log.beats else (0, 0.0)
    is_memory = log.ending == "out_of_memory"
    ended = ExitRecord(
        run_id="log", attempt=tracker.attempt,
        code=TrainerExit.OUT_OF_MEMORY if is_memory else TrainerExit.CRASHED,
        reason=f"out of memory: {log.error}" if is_memory else log.error,
        step=step, checkpoint_step=None, at=at_s, by="trainer",
    )  # fmt: skip
    evidence = tracker.evidence(at_s, ProcessEvidence(exit=ended), MachineEvidence())
    told.take(judge(evidence, limits).findings, len(log.beats), step)
