"""RunStatus: the state of a run, derived from evidence and never stored."""

from dataclasses import dataclass, field
from typing import Literal

from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_core.rundir.halt import HaltRequest
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import RunManifest

State = Literal[
    "planned", "staging", "starting", "running", "halting", "halted", "preempted",
    "resuming", "finished", "failed", "lost",
]  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """What the run directory and the process table show at one moment, by the pod's clock.

    Attributes:
        now_unix_s: The pod's clock.
        manifest: Current manifest.
        last_beat: Last heartbeat of rank 0 in the current attempt.
        exit: exit.json of the current attempt.
        halt: Stop request that means the current attempt.
        trainer_alive: The recorded trainer process still runs; None if none was recorded.
        runner_alive: The recorded runner still runs; None if none was recorded.
        watchdog_alive: The recorded watchdog still runs; None if none was recorded.
        same_boot: The recorded processes belong to this boot of the machine.
        checkpoint_step: Newest checkpoint with a manifest.
        restart: Why the run comes back by itself though no trainer runs; empty if it does not.
    """

    now_unix_s: float
    manifest: RunManifest
    last_beat: Heartbeat | None = None
    exit: ExitRecord | None = None
    halt: HaltRequest | None = None
    trainer_alive: bool | None = None
    runner_alive: bool | None = None
    watchdog_alive: bool | None = None
    same_boot: bool = True
    checkpoint_step: int | None = None
    restart: str = ""


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


def derive_status(evidence: Evidence) -> RunStatus:
    """Derive the state of a run; pure."""
    if evidence.restart:
        return RunStatus("resuming", evidence.restart)
    if evidence.exit is not None:
        return _ended(evidence.exit, evidence.halt)
    if evidence.trainer_alive or evidence.runner_alive:
        return _alive(evidence)
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


def _describe_unwatched(evidence: Evidence) -> str:
    """Who starts a dead watchdog again; empty where it lives, or none was there yet."""
    if evidence.watchdog_alive is not False:
        return ""
    if evidence.runner_alive:
        return "; its watchdog is dead, and its runner starts it again"
    return "; its watchdog and its runner are dead: the same `launch --run-id` starts a watchdog"


def _alive(evidence: Evidence) -> RunStatus:
    flags = [] if evidence.watchdog_alive else ["unwatched"]
    beat = evidence.last_beat
    if beat is None:
        word: State = "starting" if evidence.manifest.attempt == 1 else "resuming"
        return RunStatus(word, "the process runs and has not written a heartbeat yet", flags)
    age_s = max(0.0, evidence.now_unix_s - beat.ts)  # a moment can pass between the two readings
    if age_s > STALE_AFTER_S:
        flags.append("stale")
    where = f"heartbeat {age_s:.0f} s ago: phase {beat.phase}, step {beat.step}"
    where += _describe_unwatched(evidence)
    if evidence.halt is not None:
        return RunStatus("halting", f"asked to halt ({evidence.halt.reason}); {where}", flags)
    if beat.phase == "data":
        return RunStatus("staging", where, flags)
    if beat.phase in {"init", "compile"}:
        return RunStatus("starting" if evidence.manifest.attempt == 1 else "resuming", where, flags)
    return RunStatus("running", where, flags)
