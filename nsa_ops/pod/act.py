"""`python -m nsa_ops.pod.act`: one action on a run, JSON on stdin, JSON on stdout, idempotent."""

import secrets
import shutil
import signal
import sys
import time

from pydantic import ValidationError

from nsa_core.rundir import events
from nsa_core.rundir.atomic import fsync_dir
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.halt import HaltRequest, read_halt, write_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    ManifestError,
    RunManifest,
    begin_next_attempt,
    read_manifest,
    write_manifest,
)
from nsa_core.rundir.process import is_alive
from nsa_ops.pod.messages import (
    ACTION,
    HaltAction,
    NextAttemptAction,
    PrepareRunAction,
    Reply,
    ReplyCode,
    SignalAction,
)
from nsa_ops.pod.processes import (
    LockHeldError,
    RunProcesses,
    hold_lock,
    kill_session,
    read_processes,
    send,
)

#: What makes two launches the same launch; times, facts of the pod and attempts may differ.
_LAUNCH_FIELDS = (
    "run_id", "config", "parent", "profile", "code_id", "code_commit", "dirty_sha256",
    "lock_sha256",
)  # fmt: skip
#: Manifest fields that name the run or count its attempts: no change may touch them.
_FIXED_FIELDS = {"run_id", "attempt", "schema_version", "created_unix_s"}


def halt(asked: HaltAction) -> Reply:
    """Write `.HALT` for the current attempt and record who asked; a second time changes nothing."""
    run = RunDir(asked.run_dir)
    manifest = read_manifest(run)
    attempt = manifest.attempt
    if refusal := _refuse_ended(run, asked.action, asked.attempt, attempt):
        return refusal
    if read_halt(
        run, run_id=manifest.run_id, attempt=attempt, started_unix_s=_start(run, manifest)
    ):
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already", attempt=attempt,
            message=f"a halt of {manifest.run_id} attempt {attempt} was asked for before",
        )  # fmt: skip
    events.record(
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
        message=f"asked {manifest.run_id} attempt {attempt} to halt: {asked.reason}",
    )  # fmt: skip


def _start(run: RunDir, manifest: RunManifest) -> float:
    record = read_processes(run, manifest.attempt)
    return manifest.created_unix_s if record is None else record.started_unix_s


def _refuse_ended(run: RunDir, action: str, asked: int | None, current: int) -> Reply | None:
    if asked is not None and asked != current:
        return Reply(
            action=action, code=ReplyCode.CONFLICT, outcome="conflict", attempt=current,
            message=f"{run.run_id} is at attempt {current}, and attempt {asked} was meant",
            hint="Look again with `nsa-ops status`",
        )  # fmt: skip
    ended = read_exit(run)
    if ended is None or ended.attempt != current:
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
    if refusal := _refuse_ended(run, asked.action, asked.attempt, attempt):
        return refusal
    record = read_processes(run, attempt)
    if record is None or record.trainer is None or not is_alive(record.trainer):
        return Reply(
            action=asked.action, code=ReplyCode.NOT_FOUND, outcome="not_found", attempt=attempt,
            message=f"no trainer of {run.run_id} attempt {attempt} runs here",
            hint="`nsa-ops status` says what became of it",
        )  # fmt: skip
    events.record(
        run, kind="signal", by=asked.by, attempt=attempt,
        message=f"{asked.signal} to pid {record.trainer.pid}"
        + (f": {asked.reason}" if asked.reason else ""),
        facts={"signal": asked.signal, "pid": record.trainer.pid},
    )  # fmt: skip
    return _deliver(asked, record, attempt)


def _deliver(asked: SignalAction, record: RunProcesses, attempt: int) -> Reply:
    leader = record.trainer
    sent = leader is not None and (
        bool(kill_session(leader))
        if asked.signal == "KILL"
        else send(leader, signal.Signals[f"SIG{asked.signal}"])
    )
    if leader is None or not sent:
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already", attempt=attempt,
            message="the trainer ended by itself at this moment",
        )  # fmt: skip
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=attempt,
        message=f"sent {asked.signal} to the trainer, pid {leader.pid}",
    )  # fmt: skip


def prepare_run(asked: PrepareRunAction) -> Reply:
    """Make the run directory by one rename; the same launch again returns what is there."""
    run = RunDir(asked.run_dir)
    if run.root.exists():
        return _compare_with_existing(run, asked)
    run.root.parent.mkdir(parents=True, exist_ok=True)
    temporary = run.root.with_name(f".{run.root.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        write_manifest(RunDir(temporary), asked.manifest)
        temporary.rename(run.root)
    except OSError:
        shutil.rmtree(temporary)
        if not run.root.exists():
            raise
        return _compare_with_existing(run, asked)
    fsync_dir(run.root.parent)
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=asked.manifest.attempt,
        message=f"made {run.root}", manifest=asked.manifest,
    )  # fmt: skip


def _compare_with_existing(run: RunDir, asked: PrepareRunAction) -> Reply:
    if not run.manifest.exists():
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="refused",
            message=f"{run.root} exists and is not a run directory: it has no manifest.json",
            hint="Choose another run id, or move that directory away",
        )  # fmt: skip
    current = read_manifest(run)
    launched = _first_manifest(run, current)
    different = [
        name for name in _LAUNCH_FIELDS if getattr(launched, name) != getattr(asked.manifest, name)
    ]
    if different:
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="conflict",
            message=f"run {run.run_id} exists with another {', '.join(different)}",
            hint="Choose another run id, or go on with that run: `nsa-ops resume`",
            attempt=current.attempt, manifest=current,
        )  # fmt: skip
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="already", attempt=current.attempt,
        message=f"run {run.run_id} exists with the same manifest", manifest=current,
    )  # fmt: skip


def _first_manifest(run: RunDir, current: RunManifest) -> RunManifest:
    kept = RunDir(run.attempt(1))
    return read_manifest(kept) if current.attempt > 1 and kept.manifest.exists() else current


def next_attempt(asked: NextAttemptAction) -> Reply:
    """Begin the next attempt under the runner's lock, so that no trainer can be alive."""
    run = RunDir(asked.run_dir)
    fixed = sorted(_FIXED_FIELDS & asked.changes.keys())
    if fixed:
        return Reply(
            action=asked.action, code=ReplyCode.USAGE, outcome="refused",
            message=f"the next attempt cannot change {', '.join(fixed)}",
        )  # fmt: skip
    read_manifest(run)
    try:
        with hold_lock(run.runner_lock):
            return _begin(run, asked)
    except LockHeldError:
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="conflict",
            message=f"a runner or trainer of {run.run_id} is still alive",
            hint="Stop it first: `nsa-ops halt`",
        )  # fmt: skip


def _begin(run: RunDir, asked: NextAttemptAction) -> Reply:
    current = read_manifest(run)
    if current.attempt == asked.from_attempt + 1 and read_exit(run) is None:
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already", attempt=current.attempt,
            message=f"attempt {current.attempt} was begun before", manifest=current,
        )  # fmt: skip
    if current.attempt != asked.from_attempt:
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="conflict",
            attempt=current.attempt, manifest=current,
            message=f"{run.run_id} is at attempt {current.attempt}, not {asked.from_attempt}",
            hint="Look again with `nsa-ops status`",
        )  # fmt: skip
    new = _change(run, asked)
    events.record(
        run, kind="resumed", by=asked.by, attempt=new.attempt,
        message=f"attempt {new.attempt} begins from {new.resume}",
    )  # fmt: skip
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=new.attempt,
        message=f"attempt {new.attempt} of {run.run_id} may start", manifest=new,
    )  # fmt: skip


def _change(run: RunDir, asked: NextAttemptAction) -> RunManifest:
    """Validate the changed fields as a manifest before anything is moved."""
    old = read_manifest(run)
    checked = RunManifest.model_validate({**old.model_dump(mode="python"), **asked.changes})
    changes = {name: getattr(checked, name) for name in asked.changes}
    return begin_next_attempt(run, at_unix_s=time.time(), changes=changes)


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
        match asked:
            case HaltAction():
                return halt(asked)
            case SignalAction():
                return send_signal(asked)
            case PrepareRunAction():
                return prepare_run(asked)
            case NextAttemptAction():
                return next_attempt(asked)
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


def main() -> int:
    """Read the action from stdin, write the reply to stdout; the exit code is the reply's."""
    reply = act(sys.stdin.buffer.read())
    sys.stdout.write(reply.model_dump_json() + "\n")
    return int(reply.code)


if __name__ == "__main__":
    sys.exit(main())
