"""Take part in a run of several pods: pod 1, 2 … gets the manifest of the attempt of pod 0."""

from nsa_core.rundir import events
from nsa_core.rundir.atomic import clear_obstacles, fsync_dir
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest, replace_attempt, write_manifest
from nsa_ops.pod.attempts import leaving_s, make_run, refuse_alive
from nsa_ops.pod.messages import JoinAttemptAction, Reply, ReplyCode, SetAsideAction
from nsa_ops.pod.processes import LockHeldError, hold_lock, read_processes
from nsa_ops.pod.trainer_group import is_trainer_running


def join_attempt(asked: JoinAttemptAction) -> Reply:
    """Make the run directory, or the next attempt in it; asking again changes nothing."""
    run, manifest = RunDir(asked.run_dir), asked.manifest
    if not run.root.exists() and make_run(run, manifest):
        return _joined(asked, "done")
    if not run.manifest.exists():
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="refused",
            message=f"{run.root} exists and is not a run directory: it has no manifest.json",
            hint="Move that directory away there, then repeat it",
        )  # fmt: skip
    if is_same_share(read_manifest(run), manifest):
        return _joined(asked, "already")
    try:
        with hold_lock(run.runner_lock, wait_s=leaving_s(run)):
            return _follow(run, asked)
    except LockHeldError:
        return refuse_alive(run, asked.action)


def is_same_share(there: RunManifest, asked: RunManifest) -> bool:
    """Whether a pod has this very attempt, in this place among the pods."""
    same = (there.attempt, there.attempt_id) == (asked.attempt, asked.attempt_id)
    return same and there.node == asked.node


def is_earlier(there: RunManifest, asked: RunManifest) -> bool:
    """Whether a pod has an earlier attempt of the same lineage."""
    known = asked.earlier_attempts.get(there.attempt, there.attempt_id)
    return there.attempt < asked.attempt and known == there.attempt_id


def _follow(run: RunDir, asked: JoinAttemptAction) -> Reply:
    there, manifest = read_manifest(run), asked.manifest
    if is_trainer_running(run, read_processes(run, there.attempt)):  # without its torchrun
        return refuse_alive(run, asked.action)
    is_unstarted = (
        there.attempt_id == manifest.attempt_id and read_processes(run, there.attempt) is None
    )
    if not (is_earlier(there, manifest) or is_unstarted):
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="conflict",
            attempt=there.attempt, manifest=there,
            message=f"{run.root} is at attempt {there.attempt}, which is no earlier one of attempt "
            f"{manifest.attempt} that is to be joined",
            hint="Move that directory away there, then repeat it",
        )  # fmt: skip
    for line in clear_obstacles(run):
        events.record(
            run, kind="unreadable", by="operator", attempt=there.attempt, message=line
        )  # fmt: skip
    if is_unstarted:  # only its place among the pods is another one
        write_manifest(run, manifest)
    else:
        replace_attempt(run, there, manifest)
    node = manifest.node
    events.record(
        run, kind="joined", by="operator", attempt=manifest.attempt,
        message=f"pod {node.rank} of attempt {manifest.attempt}; pod 0 is {node.address}",
    )  # fmt: skip
    return _joined(asked, "done")


def _joined(asked: JoinAttemptAction, outcome: str) -> Reply:
    manifest = asked.manifest
    how = "has joined" if outcome == "done" else "had joined before:"
    return Reply(
        action=asked.action, code=ReplyCode.OK,
        outcome="done" if outcome == "done" else "already", attempt=manifest.attempt,
        message=f"pod {manifest.node.rank} {how} attempt {manifest.attempt} of {manifest.run_id}",
        manifest=manifest,
    )  # fmt: skip


def set_aside(asked: SetAsideAction) -> Reply:
    """Rename the run directory of a pod that was not pod 0; nothing in it is lost."""
    run = RunDir(asked.run_dir)
    if not run.root.exists():
        return Reply(
            action=asked.action, code=ReplyCode.OK, outcome="already",
            message=f"{run.root} is not there",
        )  # fmt: skip
    manifest = read_manifest(run)
    if manifest.node.rank == 0:
        return Reply(
            action=asked.action, code=ReplyCode.CONFLICT, outcome="refused",
            message=f"{run.root} is of pod 0 of a run, and has its checkpoints",
            hint="Move that directory away there, then repeat it",
        )  # fmt: skip
    ended = read_exit(run)
    name = f".{run.run_id}.pod{manifest.node.rank}-attempt{manifest.attempt}"
    target = run.root.with_name(name)
    number = 1
    while target.exists():
        number += 1
        target = run.root.with_name(f"{name}-{number}")
    try:
        with hold_lock(run.runner_lock, wait_s=leaving_s(run)):
            run.root.rename(target)
    except LockHeldError:
        return refuse_alive(run, asked.action)
    fsync_dir(target.parent)
    how = f"code {ended.code}" if ended else "no exit record"
    return Reply(
        action=asked.action, code=ReplyCode.OK, outcome="done", attempt=manifest.attempt,
        message=f"renamed to {target} ({how})",
    )  # fmt: skip
