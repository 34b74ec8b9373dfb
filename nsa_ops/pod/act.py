"""`python -m nsa_ops.pod.act`: one action on a run, JSON on stdin, JSON on stdout, idempotent."""

import signal
import sys
import time
from typing import Any

from pydantic import ValidationError

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
from nsa_ops.pod.processes import (
    LockHeldError,
    hold_lock,
    read_processes,
)
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
        return Reply(
            action=asked.action, code=ReplyCode.NOT_FOUND, outcome="not_found", message=str(error)
        )
    except ValidationError as error:
        return Reply(
            action=asked.action, code=ReplyCode.USAGE, outcome="refused",
            message=f"the changed manifest is not valid: {error.errors()[0]['msg']}",
        )  # fmt: skip
    except OSError as error:
        return Reply(
            action=asked.action, code=ReplyCode.LOCAL_RESOURCE, outcome="refused",
            message=f"{asked.run_dir}: {error.strerror or error}",
        )  # fmt: skip


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
    refusal = _refuse_other(run, asked.action, asked.attempt, attempt)
    if not returns:
        refusal = refusal or _refuse_ended(run, asked.action, attempt)
    if refusal:
        return refusal
    if read_halt(run, run_id=manifest.run_id, attempt=attempt):
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already", attempt=attempt,
            message=f"a halt of {manifest.run_id} attempt {attempt} was requested before",
        )  # fmt: skip
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
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=attempt,
        message=f"asked {manifest.run_id} attempt {attempt} to halt: {asked.reason}{unrecorded}",
    )  # fmt: skip


def _record(run: RunDir, **facts: Any) -> str:
    """Record a stop, which goes on without the record: why there is none, to end a message with."""
    try:
        events.record(run, **facts)
    except OSError as error:
        return f"; it could not be recorded in events.jsonl: {error.strerror or error}"
    return ""


def _refuse_other(run: RunDir, action: str, asked: int | None, current: int) -> Reply | None:
    if asked is None or asked == current:
        return None
    return Reply(
        action=action, code=ReplyCode.CONFLICT, outcome="conflict", attempt=current,
        message=f"{run.run_id} is at attempt {current}, and attempt {asked} was meant",
        hint="Look again with `nsa-ops status`",
    )  # fmt: skip


def _refuse_ended(run: RunDir, action: str, current: int) -> Reply | None:
    ended = read_exit(run, current)
    if ended is None:
        return None
    return Reply(
        action=action, code=ReplyCode.OK, outcome="already", attempt=current,
        message=f"{run.run_id} attempt {current} has ended: code {ended.code}, {ended.reason}",
    )  # fmt: skip


def send_signal(asked: SignalAction) -> Reply:
    """Signal the recorded trainer if that very process still runs; record it first."""
    run = RunDir(asked.run_dir)
    manifest = read_manifest(run)
    attempt = manifest.attempt
    if refusal := _refuse_other(run, asked.action, asked.attempt, attempt):
        return refusal
    group = group_of(run, read_processes(run, attempt))
    if group is None or not group.is_alive():
        return _refuse_ended(run, asked.action, attempt) or Reply(
            action=asked.action, code=ReplyCode.NOT_FOUND, outcome="not_found", attempt=attempt,
            message=f"no trainer of {run.run_id} attempt {attempt} runs here",
            hint="See `nsa-ops status` for what became of it",
        )  # fmt: skip
    unrecorded = _record(
        run, kind="signal", by=asked.by, attempt=attempt,
        message=f"{asked.signal} to pid {group.leader.pid}"
        + (f" and its {len(group.ranks)} ranks" if group.has_ranks else "")
        + (f": {asked.reason}" if asked.reason else ""),
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
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="refused", attempt=attempt,
            message=f"no rank of {group.run.run_id} takes {asked.signal} yet: they are starting",
            hint="Ask again when `nsa-ops status` shows a heartbeat",
        )  # fmt: skip
    if not sent:
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already", attempt=attempt,
            message="the trainer ended by itself at this moment",
        )  # fmt: skip
    whom = f"the trainer, pid {group.leader.pid}"
    if group.has_ranks and reached:
        whom = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in reached.items())
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=attempt,
        message=f"sent {asked.signal} to {whom}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
