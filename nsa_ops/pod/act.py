"""`python -m nsa_ops.pod.act`: one action on a run, JSON on stdin, JSON on stdout, idempotent."""

import signal
import sys
import time
from typing import Any

from pydantic import ValidationError

from nsa_core.config.base import disk_advice
from nsa_core.rundir import events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.halt import HaltRequest, read_halt, write_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, read_manifest
from nsa_ops.pod.attempts import next_attempt, prepare_run
from nsa_ops.pod.ending import foresee_restart
from nsa_ops.pod.join import join_attempt, set_aside
from nsa_ops.pod.messages import (
    ACTION,
    AnyAction,
    HaltAction,
    JoinAttemptAction,
    NextAttemptAction,
    PrepareRunAction,
    Reply,
    ReplyCode,
    SetAsideAction,
    SignalAction,
)
from nsa_ops.pod.processes import LockHeldError, hold_lock, read_processes
from nsa_ops.pod.trainer_group import TrainerGroup, group_of

_LOCK_WAIT_S = 5.0


def act(content: bytes) -> Reply:
    """Carry out the action that a JSON document asks for."""
    try:
        asked = ACTION.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Reply(
            action="unknown", code=ReplyCode.USAGE, outcome="refused",
            message=f"the request cannot be read: {where}: {first['msg']}",
        )  # fmt: skip
    try:
        return _carry_out(asked)
    except ManifestError as error:
        return Reply.to(asked, "not_found", str(error))
    except ValidationError as error:
        message = f"the changed manifest is not valid: {error.errors()[0]['msg']}"
        return Reply.to(asked, "refused", message, code=ReplyCode.USAGE)
    except OSError as error:
        message = f"`{asked.run_dir}` cannot be changed: {error.strerror or error}"
        hint = f"{disk_advice(error)}, then repeat it"
        return Reply.to(asked, "refused", message, hint, code=ReplyCode.LOCAL_RESOURCE)


def _carry_out(asked: AnyAction) -> Reply:
    match asked:
        case HaltAction():
            return halt(asked)
        case SignalAction():
            return send_signal(asked)
        case PrepareRunAction():
            return prepare_run(asked)
        case NextAttemptAction():
            return next_attempt(asked)
        case JoinAttemptAction():
            return join_attempt(asked)
        case SetAsideAction():
            return set_aside(asked)


def main() -> int:
    """Read the action from stdin, write the reply to stdout; the exit code is the reply's."""
    reply = act(sys.stdin.buffer.read())
    sys.stdout.write(reply.model_dump_json() + "\n")
    return int(reply.code)


def halt(asked: HaltAction) -> Reply:
    """Write `.HALT` for the current attempt and record who asked; a second time changes nothing.

    An attempt that has ended and that the watchdog is about to restart is asked too: it stays
    ended. The lock keeps the next attempt from beginning in between.
    """
    run = RunDir(asked.run_dir)
    if not foresee_restart(run, read_manifest(run)):
        return _request(run, asked)
    try:
        with hold_lock(run.runner_lock, wait_s=_LOCK_WAIT_S):
            return _request(run, asked)
    except LockHeldError:  # its trainer has not gone yet, or the next one runs already
        return _request(run, asked)


def _request(run: RunDir, asked: HaltAction) -> Reply:
    manifest = read_manifest(run)
    attempt, returns = manifest.attempt, bool(foresee_restart(run, manifest))
    refusal = _refuse_other(run, asked, attempt)
    if not returns:
        refusal = refusal or _refuse_ended(run, asked, attempt)
    if refusal:
        return refusal
    if read_halt(run, run_id=manifest.run_id, attempt=attempt):
        message = f"a halt of {manifest.run_id} attempt {attempt} was requested before"
        return Reply.to(asked, "already", message, attempt=attempt)
    unrecorded = _record(
        run, kind="halt_asked", by=asked.by, attempt=attempt, message=asked.reason,
        facts={"grace_s": asked.grace_s, "save_checkpoint": asked.save_checkpoint},
    )  # fmt: skip
    write_halt(
        run,
        HaltRequest(
            run_id=manifest.run_id, attempt=attempt, reason=asked.reason, by=asked.by,
            at=time.time(), grace_s=asked.grace_s, save_checkpoint=asked.save_checkpoint,
        ),
    )  # fmt: skip
    message = f"asked {manifest.run_id} attempt {attempt} to halt: {asked.reason}{unrecorded}"
    return Reply.to(asked, "done", message, attempt=attempt)


def _record(run: RunDir, **facts: Any) -> str:
    """Record a stop, which goes on without the record: why there is none, to end a message with."""
    try:
        events.record(run, **facts)
    except OSError as error:
        return f"; it could not be recorded in events.jsonl: {error.strerror or error}"
    return ""


def _refuse_other(run: RunDir, asked: HaltAction | SignalAction, current: int) -> Reply | None:
    if asked.attempt is None or asked.attempt == current:
        return None
    message = f"{run.run_id} is at attempt {current}, and attempt {asked.attempt} was meant"
    hint = "Look again with `nsa-ops status`"
    return Reply.to(asked, "conflict", message, hint, attempt=current)


def _refuse_ended(run: RunDir, asked: HaltAction | SignalAction, current: int) -> Reply | None:
    ended = read_exit(run, current)
    if ended is None:
        return None
    message = f"{run.run_id} attempt {current} has ended: code {ended.code}, {ended.reason}"
    return Reply.to(asked, "already", message, attempt=current)


def send_signal(asked: SignalAction) -> Reply:
    """Signal the recorded trainer if that very process still runs; record it first."""
    run = RunDir(asked.run_dir)
    manifest = read_manifest(run)
    attempt = manifest.attempt
    if refusal := _refuse_other(run, asked, attempt):
        return refusal
    group = group_of(run, read_processes(run, attempt))
    if group is None or not group.is_alive():
        message = f"no trainer of {run.run_id} attempt {attempt} runs here"
        hint = "See `nsa-ops status` for what became of it"
        return _refuse_ended(run, asked, attempt) or Reply.to(
            asked, "not_found", message, hint, attempt=attempt
        )
    unrecorded = _record(
        run, kind="signal", by=asked.by, attempt=attempt,
        message=f"{asked.signal} to {group.name}{f': {asked.reason}' if asked.reason else ''}",
        facts={"signal": asked.signal, "pid": group.leader.pid},
    )  # fmt: skip
    reply = _deliver(asked, group, attempt)
    return reply.model_copy(update={"message": reply.message + unrecorded})


def _deliver(asked: SignalAction, group: TrainerGroup, attempt: int) -> Reply:
    """USR2 goes to the first rank alone: the others save with it."""
    if asked.signal == "KILL":
        sent = bool(group.kill())
        reached = {}
    else:
        number = signal.Signals[f"SIG{asked.signal}"]
        reached = group.signal(number, only_first=asked.signal == "USR2")
        sent = bool(reached)
    if not sent and group.has_ranks and group.is_alive():
        message = f"no rank of {group.run.run_id} takes {asked.signal} yet: they are starting"
        hint = "Ask again when `nsa-ops status` shows a heartbeat"
        return Reply.to(asked, "refused", message, hint, attempt=attempt)
    if not sent:
        message = "the trainer ended by itself at this moment"
        return Reply.to(asked, "already", message, attempt=attempt)
    whom = f"the trainer, pid {group.leader.pid}"
    if group.has_ranks and reached:
        whom = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in reached.items())
    return Reply.to(asked, "done", f"sent {asked.signal} to {whom}", attempt=attempt)


if __name__ == "__main__":
    sys.exit(main())
