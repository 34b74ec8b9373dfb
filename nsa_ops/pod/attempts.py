"""Make a run directory, and begin the next attempt in one: whole or not at all."""

import secrets
import shutil
import time

from nsa_core.config.recipe import leaves
from nsa_core.rundir import events
from nsa_core.rundir.atomic import clear_obstacles, fsync_dir
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    RunManifest,
    begin_next_attempt,
    read_manifest,
    write_manifest,
)
from nsa_ops.pod.ending import read_stop
from nsa_ops.pod.messages import NextAttemptAction, PrepareRunAction, Reply, ReplyCode
from nsa_ops.pod.processes import LockHeldError, hold_lock, read_processes
from nsa_ops.pod.trainer_group import is_trainer_running
from nsa_ops.quantities import count_of

#: What makes two launches the same launch; times, facts of the pod and attempts may differ.
_LAUNCH_FIELDS = (
    "run_id", "config", "parent", "profile", "code_id", "code_commit", "dirty_sha256",
    "lock_sha256",
)  # fmt: skip
#: Keys of a configuration that a conflict names, each with both values.
_NAMED_KEYS = 5
#: Manifest fields that name the run or count its attempts: no change may touch them.
_FIXED_FIELDS = {
    "run_id", "attempt", "attempt_id", "earlier_attempts", "schema_version", "created_unix_s",
}  # fmt: skip
#: How long a trainer that has recorded its end may take to be gone.
_LEAVING_S = 10.0
_POLL_S = 0.1


def prepare_run(asked: PrepareRunAction) -> Reply:
    """Make the run directory by one rename; the same launch again returns what is there."""
    run = RunDir(asked.run_dir)
    if run.root.exists() or not make_run(run, asked.manifest):
        return _compare_with_existing(run, asked)
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=asked.manifest.attempt,
        message=f"made {run.root}", manifest=asked.manifest,
    )  # fmt: skip


def make_run(run: RunDir, manifest: RunManifest) -> bool:
    """Make a run directory by one rename; False if it exists by then."""
    run.root.parent.mkdir(parents=True, exist_ok=True)
    temporary = run.root.with_name(f".{run.root.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        write_manifest(RunDir(temporary), manifest)
        _record_launch(RunDir(temporary), manifest)
        temporary.rename(run.root)
    except OSError:
        shutil.rmtree(temporary)
        if not run.root.exists():
            raise
        return False
    fsync_dir(run.root.parent)
    return True


def _record_launch(run: RunDir, manifest: RunManifest) -> None:
    parent = manifest.parent
    source = f" from step {parent.step} of {parent.run_id}" if parent else ""
    events.record(
        run, kind="launched", by="operator", attempt=manifest.attempt,
        message=f"recipe {manifest.config.recipe}, profile {manifest.profile}{source}",
        facts={"code_id": manifest.code_id, "overrides": manifest.overrides},
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
            message=f"run {run.run_id} exists with another {', '.join(different)}"
            f"{_differing_keys(launched, asked.manifest)}",
            hint="Choose another run id, or continue that run: `nsa-ops resume`",
            attempt=current.attempt, manifest=current,
        )  # fmt: skip
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="already", attempt=current.attempt,
        message=f"run {run.run_id} exists with the same manifest", manifest=current,
    )  # fmt: skip


def _differing_keys(there: RunManifest, asked: RunManifest) -> str:
    """The first configuration keys that differ, with both values; empty where none does."""
    old, new = leaves(there.config), leaves(asked.config)
    keys = [key for key in new if old[key] != new[key]]
    named = [f"{key} is {old[key]} there and {new[key]} here" for key in keys[:_NAMED_KEYS]]
    more = [f"{count_of(len(keys) - _NAMED_KEYS, 'more key')}"] if len(keys) > _NAMED_KEYS else []
    return f": {', '.join([*named, *more])}" if keys else ""


def _first_manifest(run: RunDir, current: RunManifest) -> RunManifest:
    kept = RunDir(run.attempt(1))
    return read_manifest(kept) if current.attempt > 1 and kept.manifest.exists() else current


def next_attempt(asked: NextAttemptAction) -> Reply:
    """Begin the next attempt under the runner's lock, so that no trainer can be alive.

    One that has recorded its end is waited for: it is gone in a moment, or in a few on a busy pod.
    """
    run = RunDir(asked.run_dir)
    fixed = sorted(_FIXED_FIELDS & asked.changes.keys())
    if fixed:
        return Reply(
            action=asked.action, code=ReplyCode.USAGE, outcome="refused",
            message=f"the next attempt cannot change {', '.join(fixed)}",
        )  # fmt: skip
    read_manifest(run)
    try:
        with hold_lock(run.runner_lock, wait_s=leaving_s(run)):
            return _begin(run, asked)
    except LockHeldError:
        return refuse_alive(run, asked.action)


def leaving_s(run: RunDir) -> float:
    """How long to wait for the lock of a run: a moment where its trainer has recorded its end."""
    return 0.0 if read_exit(run) is None else _LEAVING_S


def refuse_alive(run: RunDir, action: str) -> Reply:
    """No attempt begins beside processes of another one."""
    return Reply(
        action=action, code=ReplyCode.CONFLICT, outcome="conflict",
        message=f"a runner or trainer of {run.run_id} is still alive",
        hint="Stop it first: `nsa-ops halt`",
    )  # fmt: skip


def next_attempt_in_turn(asked: NextAttemptAction, *, wait_s: float) -> Reply:
    """As `next_attempt`, for a runner that gives its lock back just after the exit record."""
    end = time.monotonic() + wait_s
    reply = next_attempt(asked)
    while reply.outcome == "conflict" and time.monotonic() < end:
        time.sleep(_POLL_S)
        reply = next_attempt(asked)
    return reply


def _begin(run: RunDir, asked: NextAttemptAction) -> Reply:
    current = read_manifest(run)
    if current.attempt == asked.from_attempt + 1 and read_exit(run) is None:
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already", attempt=current.attempt,
            message=f"attempt {current.attempt} has begun already", manifest=current,
        )  # fmt: skip
    if _outlives_its_runner(run, current, asked):
        return refuse_alive(run, asked.action)
    if current.attempt != asked.from_attempt:
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="conflict",
            attempt=current.attempt, manifest=current,
            message=f"{run.run_id} is at attempt {current.attempt}, not {asked.from_attempt}",
            hint="Look again with `nsa-ops status`",
        )  # fmt: skip
    stop = read_stop(run, current) if asked.by == "watchdog" else ""
    if stop:  # under the lock, which a halt of an ended attempt takes as well
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="refused",
            attempt=current.attempt, manifest=current, message=f"it was asked to stop: {stop}",
        )  # fmt: skip
    for line in clear_obstacles(run):  # before a new attempt is written that no event could name
        events.record(
            run, kind="unreadable", by=asked.by, attempt=current.attempt, message=line
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


def _outlives_its_runner(run: RunDir, current: RunManifest, asked: NextAttemptAction) -> bool:
    """Whether ranks of this pod still train without torchrun, which held the lock for them.

    A record that came with a restore names processes of the pod that the run leaves.
    """
    record = read_processes(run, current.attempt)
    pod_id = asked.changes.get("pod_id", current.pod_id)
    return record is not None and record.pod_id == pod_id and bool(is_trainer_running(run, record))


def _change(run: RunDir, asked: NextAttemptAction) -> RunManifest:
    """Validate the changed fields as a manifest before anything is moved."""
    old = read_manifest(run)
    wanted = RunManifest.model_validate({**old.model_dump(mode="python"), **asked.changes})
    return begin_next_attempt(run, at_unix_s=time.time(), wanted=wanted)
