"""RunStatus: the state of a run, derived from evidence and never stored."""

from dataclasses import dataclass, field
from typing import Literal

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_core.rundir.halt import HaltRequest
from nsa_core.rundir.heartbeat import Heartbeat

State = Literal[
    "planned", "staging", "starting", "running", "halting", "halted", "preempted",
    "resuming", "finished", "failed", "lost",
]  # fmt: skip


class RunEvidence(TolerantModel):
    """What the run directory and the process table show of the current attempt at one moment.

    Attributes:
        trainer_alive: The recorded trainer process still runs; None if none was recorded.
        runner_alive: The same of the runner.
        watchdog_alive: The same of the watchdog.
        same_boot: The recorded processes belong to this boot of the machine.
        last_beat: Newest heartbeat of the first rank on the pod.
        beat_age_s: Its age by the pod's clock.
        exit: How the attempt ended.
        halt: Stop request that means this attempt.
    """

    trainer_alive: bool | None = None
    runner_alive: bool | None = None
    watchdog_alive: bool | None = None
    same_boot: bool = True
    last_beat: Heartbeat | None = None
    beat_age_s: float | None = None
    exit: ExitRecord | None = None
    halt: HaltRequest | None = None


@dataclass(frozen=True)
class RunStatus:
    """A state and the sentence that proves it.

    Attributes:
        state: One of the states of a run.
        why: The evidence in one sentence.
        flags: `stale` (no heartbeat for too long), `unwatched` (no watchdog runs).
    """

    state: State
    why: str
    flags: list[str] = field(default_factory=list)


STALE_AFTER_S = 60.0


def derive_status(evidence: RunEvidence, attempt: int, restart: str = "") -> RunStatus:
    """Derive the state of a run; pure.

    Args:
        evidence: Of the current attempt.
        attempt: Its number.
        restart: Why the run comes back by itself though no trainer runs; empty if it does not.
    """
    if restart:
        return RunStatus("resuming", restart)
    if evidence.exit is not None:
        return _ended(evidence.exit, evidence.halt)
    if evidence.trainer_alive or evidence.runner_alive:
        return _alive(evidence, attempt)
    if evidence.trainer_alive is None and evidence.runner_alive is None:
        return RunStatus("planned", "no process was started for this attempt")
    if not evidence.same_boot:
        return RunStatus("preempted", "the pod was restarted while the run was going")
    return RunStatus("lost", "the processes are gone and left no exit record")


def _ended(record: ExitRecord, halt: HaltRequest | None) -> RunStatus:
    where = f"exit code {record.code} at step {record.step}: {record.reason}"
    if record.code == TrainerExit.FINISHED:
        return RunStatus("finished", where)
    if record.code in {TrainerExit.HALTED, TrainerExit.RESUMABLE}:
        return RunStatus("halted", where)
    asked = f"; {halt.by} had asked it to halt ({halt.reason})" if halt else ""
    return RunStatus("failed", where + asked)


def _describe_unwatched(evidence: RunEvidence) -> str:
    """Who starts a dead watchdog again; empty where it lives, or none was there yet."""
    if evidence.watchdog_alive is not False:
        return ""
    if evidence.runner_alive:
        return "; its watchdog is dead, and its runner starts it again"
    return "; its watchdog and its runner are dead: the same `launch --run-id` starts a watchdog"


def _alive(evidence: RunEvidence, attempt: int) -> RunStatus:
    flags = [] if evidence.watchdog_alive else ["unwatched"]
    beat = evidence.last_beat
    beginning: State = "starting" if attempt == 1 else "resuming"
    if beat is None:
        return RunStatus(beginning, "the process runs and has not written a heartbeat yet", flags)
    age_s = max(0.0, evidence.beat_age_s or 0.0)  # a moment can pass between the two readings
    if age_s > STALE_AFTER_S:
        flags.append("stale")
    where = f"heartbeat {age_s:.0f} s ago: phase {beat.phase}, step {beat.step}"
    where += _describe_unwatched(evidence)
    if evidence.halt is not None:
        return RunStatus("halting", f"asked to halt ({evidence.halt.reason}); {where}", flags)
    if beat.phase == "data":
        return RunStatus("staging", where, flags)
    if beat.phase in {"init", "compile"}:
        return RunStatus(beginning, where, flags)
    return RunStatus("running", where, flags)
