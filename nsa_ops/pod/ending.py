"""How an attempt ended, written for a trainer that could not, and whether another one follows."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.events import Event, find_events
from nsa_core.rundir.exit import HANG_RULES, ExitRecord, TrainerExit, read_exit, write_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import Restarter, is_running, is_this_boot, read_processes
from nsa_ops.pod.rank_ending import JudgedEnd, judge_ranks, name_signal
from nsa_ops.pod.rank_traces import last_beat, read_traces
from nsa_ops.pod.rank_watch import RankSightings
from nsa_ops.pod.read_run import list_checkpoint_facts, newest_whole
from nsa_ops.pod.trainer_group import is_trainer_running
from nsa_ops.quantities import count_of

#: Where Linux counts the processes that the memory limit of this container has killed.
_MEMORY_EVENTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
_UNKNOWN_KILLER = "out of host memory, or by hand"
_STOP_SIGNALS = {"TERM", "KILL", "INT"}
#: Kinds of events that `asked_to_stop` judges.
STOP_KINDS = ("halt_asked", "signal")
RESTARTED = "restarted"
RESTARTABLE = {code for code in TrainerExit if code.watchdog_may_restart}


def count_memory_kills(files: tuple[Path, ...] = _MEMORY_EVENTS) -> int:
    """Processes of this container that the kernel killed for memory; 0 where it is not counted."""
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def asked_to_stop(events: list[Event], attempt: int) -> Event | None:
    """The first event of this attempt that asked it to stop; None if there is none.

    A TERM that the runner only forwarded means that the pod goes down; it is no request to stop.
    """
    for event in events:
        if event.attempt != attempt:
            continue
        if event.kind == "halt_asked":
            return event
        name = event.facts.get("signal")
        if event.kind == "signal" and name in _STOP_SIGNALS:
            if event.by == "runner" and name == "TERM":
                continue
            return event
    return None


def last_step(run: RunDir, manifest: RunManifest) -> int:
    """The highest step in the heartbeats of this attempt on this pod; 0 without one."""
    beats = (last_beat(run, rank, manifest.attempt) for rank in manifest.pod_ranks)
    return max((beat.step for beat in beats if beat is not None), default=0)


def explain_code(code: int, *, asked: Event | None, memory_kills: int) -> str:
    """One line about an exit code of a trainer that left no record."""
    if code == 0:
        return "ended with code 0 and without an exit record"
    if code > 0:
        return f"ended with code {code} and without an exit record; see the end of training.log"
    name = name_signal(-code)
    unknown = _UNKNOWN_KILLER if code == -signal.SIGKILL else ""
    why = _explain_kill(asked, memory_kills) or unknown
    return f"killed by {name}: {why}" if why else f"killed by {name}"


def _explain_kill(asked: Event | None, memory_kills: int) -> str:
    """Who or what kills processes here; empty if nothing is known."""
    if memory_kills > 0:
        return "the pod's memory limit was reached (the kernel counted it)"
    return f"{asked.by} asked ({asked.message})" if asked is not None else ""


@dataclass(frozen=True)
class ProcessEnd:
    """What the runner knows of the end of its trainer.

    Attributes:
        code: Exit code of the process, negative for a signal; with several ranks that of torchrun.
        memory_kills: Processes that the kernel killed for memory while it ran.
        seen: What was seen of its ranks.
        log_offset: Bytes of training.log before this attempt.
    """

    code: int
    memory_kills: int = 0
    seen: RankSightings = field(default_factory=RankSightings)
    log_offset: int = 0


def write_missing_exit(
    run: RunDir, manifest: RunManifest, process: ProcessEnd | None = None
) -> ExitRecord:
    """The exit record of the trainer, or that of `missing_exit`, written now, if it left none."""
    written = read_exit(run, manifest.attempt)
    if written is not None:  # then nothing else is read: the disk may be failing
        return written
    missing = missing_exit(run, manifest, process)
    write_exit(run, missing)
    return missing


def missing_exit(
    run: RunDir, manifest: RunManifest, process: ProcessEnd | None = None
) -> ExitRecord:
    """The record of an attempt whose trainer left none.

    A trainer that ends with 0 without having written a record has not finished: code 1. One that
    the watchdog had to end because nothing moved gets the code of a hang; its reason names the
    signal. Of several ranks it is the record of the one that failed first. `process` is None where
    the runner is gone too, so that the watchdog writes and the code is unknown.
    """
    checkpoints = list_checkpoints(run)
    asked = asked_to_stop(find_events(run, *STOP_KINDS), manifest.attempt)
    found = _judge_ranks(run, manifest, process, asked) or _judge_process(process, asked)
    return ExitRecord(
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        code=found.code,
        reason=found.reason,
        step=last_step(run, manifest),
        checkpoint_step=checkpoints[0].step if checkpoints else None,
        at=time.time(),
        by="watchdog" if process is None else "runner",
    )


def _judge_process(process: ProcessEnd | None, asked: Event | None) -> JudgedEnd:
    """The end of a trainer that is one process, or of torchrun where no rank has left a trace."""
    if process is None:
        why = "the trainer and its runner are gone; the exit code is unknown"
        return JudgedEnd(TrainerExit.CRASHED, why)
    reason = explain_code(process.code, asked=asked, memory_kills=process.memory_kills)
    if process.code < 0 and asked is not None and asked.facts.get("rule") in HANG_RULES:
        return JudgedEnd(TrainerExit.HANG, reason)
    return JudgedEnd(process.code or TrainerExit.CRASHED, reason)


def _judge_ranks(
    run: RunDir, manifest: RunManifest, process: ProcessEnd | None, asked: Event | None
) -> JudgedEnd | None:
    """The end of several ranks; None where there is one, or where torchrun was killed itself."""
    total = manifest.config.num_ranks
    is_killed = asked is not None and asked.facts.get("signal") == "KILL"
    if total == 1 or is_killed or (process and process.seen.torchrun_first):
        return None
    seen, offset = (process.seen, process.log_offset) if process else (RankSightings(), 0)
    is_hang = asked is not None and asked.facts.get("rule") in HANG_RULES
    return judge_ranks(
        read_traces(run, manifest.attempt, manifest.pod_ranks, seen, offset),
        total,
        why_killed=_explain_kill(asked, process.memory_kills if process else 0) or _UNKNOWN_KILLER,
        hung=f"{asked.by}: {asked.message}" if asked is not None and is_hang else "",
    )


@dataclass(frozen=True)
class RestartDecision:
    """Restart or not, and why in one sentence."""

    restart: bool
    why: str


def decide_restart(
    ended: ExitRecord,
    *,
    stop_asked: str,
    steps_done: int,
    without_progress: int,
    budget: int,
    num_pods: int = 1,
) -> RestartDecision:
    """Restart only what was preempted, or what crashed after it had trained.

    `stop_asked`: who asked this attempt to stop and why; empty without a request.
    `without_progress`: what `count_without_progress` counts.
    `budget`: most restarts without a new checkpoint.
    `num_pods`: pods that train together; of several, one alone restarts nothing.
    """
    if ended.code == TrainerExit.FINISHED:
        return _no_restart("the run has finished")
    if stop_asked:
        return _no_restart(f"it was asked to stop: {stop_asked}")
    if num_pods > 1:
        return _no_restart(
            f"a watchdog knows one of its {num_pods} pods; `nsa-ops resume` starts all of them"
        )
    if ended.code > 0 and ended.code not in RESTARTABLE:
        return _no_restart(f"code {ended.code} is never restarted: {ended.reason}")
    preempted = ended.code == TrainerExit.RESUMABLE
    if not preempted and steps_done == 0:
        return _no_restart(f"it crashed before its first step: {ended.reason}")
    if without_progress >= budget:
        restarts = count_of(without_progress, "restart")
        return _no_restart(f"{restarts} brought no new checkpoint (budget {budget})")
    what = "was preempted" if preempted else "crashed"
    return RestartDecision(restart=True, why=f"it {what} at step {ended.step}: {ended.reason}")


def _no_restart(why: str) -> RestartDecision:
    return RestartDecision(restart=False, why=why)


def count_without_progress(events: Sequence[Event], checkpoint_step: int | None) -> int:
    """Restarts by the watchdog in a row that began from the checkpoint that is still the newest."""
    count = 0
    for event in reversed(events):
        if event.kind == "resumed" and event.by == "operator":
            break
        if event.kind == RESTARTED:
            if event.facts.get("checkpoint_step") != checkpoint_step:
                break
            count += 1
    return count


def read_stop(run: RunDir, manifest: RunManifest) -> str:
    """Who asked the current attempt to stop and why; empty without a request."""
    event = asked_to_stop(find_events(run, *STOP_KINDS), manifest.attempt)
    if event is not None:
        return f"{event.by}: {event.message}"
    request = read_halt(run, run_id=manifest.run_id, attempt=manifest.attempt)
    return f"{request.by}: {request.reason}" if request else ""


def decide_after(
    run: RunDir, manifest: RunManifest, ended: ExitRecord, by: Restarter = "watchdog"
) -> RestartDecision:
    """Whether the watchdog, or the engine, begins another attempt after this end of the current."""
    record = read_processes(run, manifest.attempt)
    if by == "watchdog" and record is not None and record.restarted_by == "engine":
        return _no_restart("its engine starts it again, not the watchdog")
    return decide_restart(
        ended,
        stop_asked=read_stop(run, manifest),
        steps_done=last_step(run, manifest),
        without_progress=count_without_progress(
            find_events(run, "resumed", RESTARTED), newest_whole(list_checkpoint_facts(run))
        ),
        budget=manifest.config.watchdog.restart_budget,
        num_pods=manifest.config.runtime.num_pods if by == "watchdog" else 1,
    )


def foresee_restart(run: RunDir, manifest: RunManifest) -> str:
    """Why the watchdog will restart the run, while no trainer of it runs; empty if it will not.

    This lasts from the end of an attempt until the watchdog has begun the next one, and
    from then until the new runner has recorded itself.
    """
    watchdog = read_watchdog(run)
    if watchdog is None or not is_running(watchdog.identity):
        return ""
    if watchdog.doing == "done" and watchdog.attempt == manifest.attempt:
        return ""
    ended = _read_end(run, manifest)
    if ended is None:
        begun = any(
            event.by == "watchdog" and event.attempt == manifest.attempt
            for event in find_events(run, "resumed")
        )
        is_waiting = begun and read_processes(run, manifest.attempt) is None
        return "the watchdog has begun this attempt and starts its runner" if is_waiting else ""
    decision = decide_after(run, manifest, ended)
    return f"the watchdog is about to restart it: {decision.why}" if decision.restart else ""


def _read_end(run: RunDir, manifest: RunManifest) -> ExitRecord | None:
    """How the current attempt ended, also if the record is not written yet; None if it runs."""
    ended = read_exit(run, manifest.attempt)
    if ended is not None:
        return ended
    record = read_processes(run, manifest.attempt)
    if record is None or record.trainer is None or not is_this_boot(record):
        return None
    if is_trainer_running(run, record) or is_running(record.runner):
        return None
    return missing_exit(run, manifest)
