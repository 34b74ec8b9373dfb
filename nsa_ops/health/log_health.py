"""Replay a log file of any trainer to the rules that watch our runs: what would they have said?"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_ops.errors import (
    ConfigurationError,
    HaltVerdictError,
    OpsError,
    UnknownVerdictError,
)
from nsa_ops.health.foreign_logs import parse_log
from nsa_ops.health.foreign_reader import ForeignLog
from nsa_ops.local_files import read_named
from nsa_ops.pod.rank_tracker import is_record
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.rules.verdict import Finding, Level
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, Tracker
from nsa_ops.quantities import count_of


@dataclass(frozen=True)
class Alarm:
    """The first time that a rule gave a level, or a worse stage of it."""

    record: int  # from 0; the number of records for the end of the log
    step: int
    finding: Finding


@dataclass
class LogReplay:
    """What the rules would have said while a log was written."""

    num_records: int = 0  # that were judged
    alarms: list[Alarm] = field(default_factory=list)  # the first of each rule and level, in order
    num_findings: dict[str, int] = field(default_factory=dict)  # records on which a rule spoke
    last_steps: dict[str, int] = field(default_factory=dict)  # the last of these steps
    ending: str = ""  # how the log says that the run was stopped from outside

    def first(self, level: Level) -> Alarm | None:
        """The first alarm of a level."""
        return next((alarm for alarm in self.alarms if alarm.finding.level == level), None)

    def take(self, findings: list[Finding], record: int, step: int) -> None:
        """Note what is new among findings."""
        known = {(one.finding.rule, one.finding.level, one.finding.stage) for one in self.alarms}
        for finding in findings:
            self.num_findings[finding.rule] = self.num_findings.get(finding.rule, 0) + 1
            self.last_steps[finding.rule] = step
            if (finding.rule, finding.level, finding.stage) not in known:
                self.alarms.append(Alarm(record, step, finding))


@dataclass(frozen=True)
class LogHealth:
    """What the rules find in a log."""

    path: Path
    #: The worst level that any rule gave; `unknown` where no rule found anything in a log that was
    #: read in part only.
    level: Literal["healthy", "warn", "halt", "unknown"]
    num_unread: int  # lines with figures that were not understood, all of one shape
    replay: LogReplay  # number of records, and the first alarm of each rule and level


def replay(log: ForeignLog, limits: WatchdogLimits) -> LogReplay:
    """Judge a log after every record, as a watchdog that is never late would."""
    found = LogReplay()
    tracker = Tracker(log.facts, attempt=1)
    for index, beat in enumerate(log.beats):
        if beat.attempt != tracker.attempt:
            tracker = Tracker(log.facts, beat.attempt, tracker.best_rate)
        tracker.feed([beat])
        evidence = tracker.evidence(beat.ts, ProcessEvidence(), MachineEvidence())
        found.take(judge(evidence, limits).findings, index, beat.step)
    found.num_records = sum(is_record(beat) for beat in log.beats)
    if log.ending == "stopped":
        step = log.beats[-1].step if log.beats else 0
        found.ending = f"stopped from outside after step {step}: {log.error}"
    elif log.ending:
        _judge_end(log, tracker, limits, found)
    return found


def _judge_end(log: ForeignLog, tracker: Tracker, limits: WatchdogLimits, found: LogReplay) -> None:
    step, at_s = (log.beats[-1].step, log.beats[-1].ts) if log.beats else (0, 0.0)
    is_memory = log.ending == "out_of_memory"
    ended = ExitRecord(
        run_id="log", attempt=tracker.attempt,
        code=TrainerExit.OUT_OF_MEMORY if is_memory else TrainerExit.CRASHED,
        reason=f"out of memory: {log.error}" if is_memory else log.error,
        step=step, checkpoint_step=None, at=at_s, by="trainer",
    )  # fmt: skip
    evidence = tracker.evidence(at_s, ProcessEvidence(exit=ended), MachineEvidence())
    found.take(judge(evidence, limits).findings, len(log.beats), step)


def judge_log(path: Path, run_id: str | None = None) -> LogHealth:
    """Replay a log record by record.

    Raises:
        ConfigurationError: If a run is named as well, or the file has no record that is understood.
        OpsError: As `read_named`.
    """
    if run_id is not None:
        message = f"Run `{run_id}` and `--log {path}` cannot be judged at once"
        raise ConfigurationError(message, hint="Leave one of the two out")
    log = parse_log(read_named(path, "Log").decode(errors="replace"))
    if not log.beats and not log.error:
        message = f"Log `{path}` has no line with a training step"
        raise ConfigurationError(message, hint="A line needs a step and a loss")
    found = replay(log, WatchdogLimits())
    return LogHealth(path, _level(log, found), log.num_unread, found)


def failure_of(health: LogHealth) -> OpsError | None:
    """What the verdict on a log means where it is a failure."""
    if health.level == "halt":
        message = f"`{health.path}` has records that would halt a run"
        return HaltVerdictError(message, hint="See each rule in docs/watchdog.md")
    if health.level == "unknown":
        message = (
            f"{count_of(health.replay.num_records, 'record')} of `{health.path}` could be read, "
            f"and {count_of(health.num_unread, 'line')} could not"
        )
        return UnknownVerdictError(message, hint="A line needs a step and a loss")
    return None


def _level(log: ForeignLog, found: LogReplay) -> Literal["healthy", "warn", "halt", "unknown"]:
    if found.alarms:
        return "halt" if found.first("halt") else "warn"
    return "unknown" if log.num_unread > len(log.beats) else "healthy"
