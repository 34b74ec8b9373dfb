"""How an attempt ended, told from outside when the trainer could not write it itself."""

import signal
import time
from pathlib import Path
from typing import Literal

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.events import Event, find_events
from nsa_core.rundir.exit import HANG_RULES, ExitRecord, TrainerExit, read_exit, write_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.jsonl import read_last_records
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest

#: Where Linux counts the processes that the memory limit of this container has killed.
_MEMORY_EVENTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
#: Stands for the code of a trainer whose runner was gone too: nobody could wait for it.
UNKNOWN_CODE = 1
_STOP_SIGNALS = {"TERM", "KILL", "INT"}
#: Kinds of events that `asked_to_stop` judges.
STOP_KINDS = ("halt_asked", "signal")


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
    """The first event of this attempt by which somebody asked it to stop; None if nobody did.

    A TERM that the runner only handed on is a pod going down, not a wish.
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


def last_step(run: RunDir, attempt: int) -> int:
    """The highest step that a heartbeat of this attempt told, 0 without one."""
    beats = read_last_records(run.heartbeat(), Heartbeat).records
    return max((beat.step for beat in beats if beat.attempt == attempt), default=0)


def explain_code(code: int, *, asked: Event | None, memory_kills: int) -> str:
    """One line about an exit code of a trainer that left no record."""
    if code == 0:
        return "ended with code 0 and without an exit record"
    if code > 0:
        return f"ended with code {code} and without an exit record; training.log has its last words"
    name = signal.Signals(-code).name
    if memory_kills > 0:
        return f"killed by {name}: the pod's memory limit was reached (the kernel counted it)"
    if asked is not None:
        return f"killed by {name}: {asked.by} asked ({asked.message})"
    if code == -signal.SIGKILL:
        return f"killed by {name}: out of host memory, or by hand"
    return f"killed by {name}"


def _code_of(code: int, asked: Event | None) -> int:
    """The code for the record: a hang has its own, and 0 without a record is a crash."""
    if code < 0 and asked is not None and asked.facts.get("rule") in HANG_RULES:
        return TrainerExit.HANG
    return code if code else TrainerExit.CRASHED


def write_missing_exit(
    run: RunDir,
    manifest: RunManifest,
    code: int,
    *,
    memory_kills: int,
    by: Literal["runner", "watchdog"] = "runner",
) -> ExitRecord:
    """The trainer's exit record, or one made here if it left none.

    A trainer that ends with 0 without having written a record has not finished: code 1. One that
    the watchdog had to end because nothing moved gets the code of a hang; its reason names the
    signal.

    Args:
        run: Run directory.
        manifest: Manifest of the attempt.
        code: Exit code of the process, negative for a signal.
        memory_kills: Processes that the kernel killed for memory while it ran.
        by: Who writes; the watchdog does where the runner is gone and nobody knows the code.
    """
    written = read_exit(run)
    if written is not None and written.attempt == manifest.attempt:
        return written
    record = missing_exit(run, manifest, code, memory_kills=memory_kills, by=by)
    write_exit(run, record)
    return record


def missing_exit(
    run: RunDir,
    manifest: RunManifest,
    code: int,
    *,
    memory_kills: int,
    by: Literal["runner", "watchdog"] = "runner",
) -> ExitRecord:
    """The record that `write_missing_exit` writes for a trainer that left none."""
    checkpoints = list_checkpoints(run)
    asked = asked_to_stop(find_events(run, *STOP_KINDS), manifest.attempt)
    reason = "the trainer and its runner are gone; nobody saw the exit code"
    if by == "runner":
        reason = explain_code(code, asked=asked, memory_kills=memory_kills)
    return ExitRecord(
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        code=_code_of(code, asked),
        reason=reason,
        step=last_step(run, manifest.attempt),
        checkpoint_step=checkpoints[0].step if checkpoints else None,
        at=time.time(),
        by=by,
    )
