"""Make a run directory, and begin the next attempt in one: whole or not at all."""

import secrets
import shutil
import time
from collections.abc import Callable

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
from nsa_ops.pod.messages import (
    AnyAction,
    JoinAttemptAction,
    NextAttemptAction,
    PrepareRunAction,
    Reply,
    ReplyCode,
)
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
    return Reply.to(asked, "done", f"made {run.root}", manifest=asked.manifest)


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
        return refuse_other_folder(asked, "Choose another run id, or move that directory away")
    current = read_manifest(run)
    launched = _first_manifest(run, current)
    different = [
        name for name in _LAUNCH_FIELDS if getattr(launched, name) != getattr(asked.manifest, name)
    ]
    if different:
        keys = _differing_keys(launched, asked.manifest)
        message = f"run {run.run_id} exists with another {', '.join(different)}{keys}"
        hint = "Choose another run id, or continue that run: `nsa-ops resume`"
        return Reply.to(asked, "conflict", message, hint, manifest=current)
    message = f"run {run.run_id} exists with the same manifest"
    return Reply.to(asked, "already", message, manifest=current)


def refuse_other_folder(asked: PrepareRunAction | JoinAttemptAction, hint: str) -> Reply:
    """Nothing is made where something else is."""
    message = f"{asked.run_dir} exists and is not a run directory: it has no manifest.json"
    return Reply.to(asked, "refused", message, hint)


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
    """Begin the next attempt under the runner's lock, so that no trainer can be alive."""
    run = RunDir(asked.run_dir)
    fixed = sorted(_FIXED_FIELDS & asked.changes.keys())
    if fixed:
        message = f"the next attempt cannot change {', '.join(fixed)}"
        return Reply.to(asked, "refused", message, code=ReplyCode.USAGE)
    read_manifest(run)
    return under_lock(run, asked, lambda: _begin(run, asked))


def under_lock(run: RunDir, asked: AnyAction, change: Callable[[], Reply]) -> Reply:
    """Change a run directory under its runner's lock; refused while somebody holds it.

    A trainer that has recorded its end is waited for: it is gone in a moment, or in a few on a
    busy pod.
    """
    wait_s = 0.0 if read_exit(run) is None else _LEAVING_S
    try:
        with hold_lock(run.runner_lock, wait_s=wait_s):
            return change()
    except LockHeldError:
        return refuse_alive(run, asked)


def refuse_alive(run: RunDir, asked: AnyAction) -> Reply:
    """No attempt begins beside processes of another one."""
    message = f"a runner or trainer of {run.run_id} is still alive"
    return Reply.to(asked, "conflict", message, "Stop it first: `nsa-ops halt`")


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
        message = f"attempt {current.attempt} has begun already"
        return Reply.to(asked, "already", message, manifest=current)
    if _outlives_its_runner(run, current, asked):
        return refuse_alive(run, asked)
    if current.attempt != asked.from_attempt:
        message = f"{run.run_id} is at attempt {current.attempt}, not {asked.from_attempt}"
        hint = "Look again with `nsa-ops status`"
        return Reply.to(asked, "conflict", message, hint, manifest=current)
    stop = read_stop(run, current) if asked.by == "watchdog" else ""
    if stop:  # under the lock, which a halt of an ended attempt takes as well
        return Reply.to(asked, "refused", f"it was asked to stop: {stop}", manifest=current)
    # Before a new attempt is written that no event could name.
    record_obstacles(run, attempt=current.attempt, by=asked.by)
    wanted = RunManifest.model_validate({**current.model_dump(mode="python"), **asked.changes})
    new = begin_next_attempt(run, at_unix_s=time.time(), wanted=wanted)
    events.record(
        run, kind="resumed", by=asked.by, attempt=new.attempt,
        message=f"attempt {new.attempt} begins from {new.resume}",
    )  # fmt: skip
    message = f"attempt {new.attempt} of {run.run_id} may start"
    return Reply.to(asked, "done", message, manifest=new)


def record_obstacles(run: RunDir, rank: int = 0, *, attempt: int, by: str) -> None:
    """Move aside what stands where files of the run belong, each thing with an event."""
    for line in clear_obstacles(run, rank):
        events.record(run, kind="unreadable", by=by, attempt=attempt, message=line)


def _outlives_its_runner(run: RunDir, current: RunManifest, asked: NextAttemptAction) -> bool:
    """Whether ranks of this pod still train without torchrun, which held the lock for them.

    A record that came with a restore names processes of the pod that the run leaves.
    """
    record = read_processes(run, current.attempt)
    pod_id = asked.changes.get("pod_id", current.pod_id)
    return record is not None and record.pod_id == pod_id and bool(is_trainer_running(run, record))
