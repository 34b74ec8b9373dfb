"""Take part in a run of several pods: pod 1, 2 … gets the manifest of the attempt of pod 0."""

from nsa_core.rundir import events
from nsa_core.rundir.atomic import fsync_dir
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest, replace_attempt, write_manifest
from nsa_ops.pod.attempts import (
    make_run,
    record_obstacles,
    refuse_alive,
    refuse_other_folder,
    under_lock,
)
from nsa_ops.pod.messages import JoinAttemptAction, Reply, SetAsideAction
from nsa_ops.pod.processes import read_processes
from nsa_ops.pod.trainer_group import is_trainer_running

_MOVE_AWAY = "Move that directory away there, then repeat it"


def join_attempt(asked: JoinAttemptAction) -> Reply:
    """Make the run directory, or the next attempt in it; asking again changes nothing."""
    run, manifest = RunDir(asked.run_dir), asked.manifest
    place = f"attempt {manifest.attempt} of {manifest.run_id}"
    joined = Reply.to(
        asked, "done", f"pod {manifest.node.rank} has joined {place}", manifest=manifest
    )
    if not run.root.exists() and make_run(run, manifest):
        return joined
    if not run.manifest.exists():
        return refuse_other_folder(asked, _MOVE_AWAY)
    there = read_manifest(run)
    if (there.attempt_id, there.attempt, there.node) == (
        manifest.attempt_id, manifest.attempt, manifest.node,
    ):  # fmt: skip
        message = f"pod {manifest.node.rank} had joined before: {place}"
        return Reply.to(asked, "already", message, manifest=manifest)
    return under_lock(run, asked, lambda: _follow(run, asked) or joined)


def _is_earlier(there: RunManifest, asked: RunManifest) -> bool:
    """Whether a pod has an earlier attempt of the same lineage."""
    known = asked.earlier_attempts.get(there.attempt, there.attempt_id)
    return there.attempt < asked.attempt and known == there.attempt_id


def _follow(run: RunDir, asked: JoinAttemptAction) -> Reply | None:
    """Take the manifest in the place of what is there; why not, where that may not be."""
    there, manifest = read_manifest(run), asked.manifest
    process = read_processes(run, there.attempt)
    if is_trainer_running(run, process):  # without its torchrun
        return refuse_alive(run, asked)
    is_unstarted = there.attempt_id == manifest.attempt_id and process is None
    if not (_is_earlier(there, manifest) or is_unstarted):
        message = (
            f"{run.root} is at attempt {there.attempt}, which is no earlier one of attempt "
            f"{manifest.attempt} that is to be joined"
        )
        return Reply.to(asked, "conflict", message, _MOVE_AWAY, manifest=there)
    record_obstacles(run, attempt=there.attempt, by="operator")
    if is_unstarted:  # only its place among the pods is another one
        write_manifest(run, manifest)
    else:
        replace_attempt(run, there, manifest)
    node = manifest.node
    events.record(
        run, kind="joined", by="operator", attempt=manifest.attempt,
        message=f"pod {node.rank} of attempt {manifest.attempt}; pod 0 is {node.address}",
    )  # fmt: skip
    return None


def set_aside(asked: SetAsideAction) -> Reply:
    """Rename the run directory of a pod that was not pod 0; nothing in it is lost."""
    run = RunDir(asked.run_dir)
    if not run.root.exists():
        return Reply.to(asked, "already", f"{run.root} is not there")
    if read_manifest(run).node.rank == 0:
        message = f"{run.root} is of pod 0 of a run, and has its checkpoints"
        return Reply.to(asked, "refused", message, _MOVE_AWAY)
    return under_lock(run, asked, lambda: _rename(run, asked))


def _rename(run: RunDir, asked: SetAsideAction) -> Reply:
    manifest, ended = read_manifest(run), read_exit(run)
    if is_trainer_running(run, read_processes(run, manifest.attempt)):  # without its torchrun
        return refuse_alive(run, asked)
    name = f".{run.run_id}.pod{manifest.node.rank}-attempt{manifest.attempt}"
    target = run.root.with_name(name)
    number = 1
    while target.exists():
        number += 1
        target = run.root.with_name(f"{name}-{number}")
    run.root.rename(target)
    fsync_dir(target.parent)
    how = f"code {ended.code}" if ended else "no exit record"
    return Reply.to(asked, "done", f"renamed to {target} ({how})", attempt=manifest.attempt)
