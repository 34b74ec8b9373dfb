"""Checkpoints on a pod: a named one must exist and be whole before anything begins from it."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from nsa_core.config.base import one_line
from nsa_core.config.compare import other_model
from nsa_core.config.run import RunConfig
from nsa_core.rundir.bounded_json import MANIFEST, parse_model
from nsa_core.rundir.checkpoint import CONFIG_FILE, NO_FOLDER, CheckpointState
from nsa_core.rundir.lineage import find_foreign
from nsa_core.rundir.manifest import Parent, RunManifest
from nsa_ops.agents import verify
from nsa_ops.backup.disk import RESERVE_BYTES, describe_need
from nsa_ops.context import PodLink, RunHandle
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    VerificationError,
)
from nsa_ops.estimate import estimate_run
from nsa_ops.local_files import read_named
from nsa_ops.remote.snapshot import has_code
from nsa_ops.remote.transport import QUICK_S

MORE_STEPS = "To train on, give it more steps: `--set schedule.steps=N`"
_BEGIN = "begin at the first step: `resume --afresh`, or `launch` without `--resume-from`"


def require_checkpoint(run: RunHandle, path: str) -> CheckpointState:
    """A whole checkpoint on a run's pod, every hash checked; a relative path is below the root.

    Raises:
        NotFoundError: If it does not exist.
        VerificationError: If it is not whole.
    """
    folder = str(run.link.root / path)
    found = verify(run, folder).checkpoints[0]
    if found.damage == NO_FOLDER:
        raise _missing(run.link, folder)
    if found.damage:
        message = f"Checkpoint `{folder}` cannot be used: {found.damage}"
        raise VerificationError(message, hint="Leave the path out to use the newest whole one")
    return found


def refuse_foreign(checkpoint: CheckpointState, manifest: RunManifest) -> None:
    """Refuse a checkpoint that neither the run nor the parent it began from wrote.

    Args:
        checkpoint: What the agent says of it; without a run id it says nothing about who wrote it.
        manifest: Manifest of the run that would continue from it.
    """
    foreign = find_foreign(checkpoint, manifest) if checkpoint.run_id else None
    if foreign is not None:
        message = f"Checkpoint `{checkpoint.path}` is not of run `{manifest.run_id}`: {foreign}"
        hint = "Leave the path out, or begin a new run from it: `nsa-ops launch --resume-from PATH`"
        raise VerificationError(message, hint=hint)


def refuse_other_model(folder: str, config: RunConfig, link: PodLink | None = None) -> None:
    """Refuse a checkpoint whose weights are not of this model.

    Its own file says which one they are of: the manifest of its run may have changed since. Where
    another trainer writes no such file, that trainer judges.

    Args:
        folder: The checkpoint.
        config: Configuration of the attempt that would begin from it.
        link: Pod that has it; None for this machine.

    Raises:
        ConfigurationError: If a value of the model differs.
        VerificationError: If the file cannot be used.
    """
    path, limit = f"{folder}/{CONFIG_FILE}", MANIFEST.max_bytes
    try:
        if link is None:
            content = read_named(Path(path), "Configuration", max_bytes=limit)
        else:
            content = link.transport.tail(path, 0, max_bytes=limit, timeout_s=QUICK_S)
        own = parse_model(RunConfig, content, MANIFEST)
    except NotFoundError:
        return
    except ValueError as error:
        message = f"`{path}` cannot be used: {one_line(error)}"
        hint = f"Name another checkpoint, or {_BEGIN}"
        raise VerificationError(message, hint=hint) from error
    other = other_model(own, config)
    if other is not None:
        is_there = f"`{other.key}` is {other.before} there, not {other.now}"
        message = f"Checkpoint `{folder}` holds another model: {is_there}"
        hint = f"Leave `{other.key}` as the checkpoint has it, or {_BEGIN}"
        raise ConfigurationError(message, hint=hint)


def refuse_trained(step: int, config: RunConfig, *, may_only_end: bool = False) -> None:
    """Refuse a beginning after which no step is left to train; pure.

    Args:
        step: Step of the checkpoint that it begins from; 0 without one.
        config: Configuration of the attempt that would begin.
        may_only_end: The run was cut between its last step and its end, and has that left to do.

    Raises:
        ConfigurationError: If nothing is left to train.
    """
    steps = config.schedule.steps
    if step > steps or (step == steps and not may_only_end):
        message = f"Nothing is left to train at step {step:,}: `schedule.steps` is {steps:,}"
        raise ConfigurationError(message, hint=MORE_STEPS)


def refuse_full_disk(
    run: RunHandle, free_bytes: int | None, config: RunConfig, overrides: Mapping[str, str]
) -> None:
    """Refuse an attempt that could not save a single checkpoint, before it is begun.

    Args:
        run: On the pod whose disk takes the checkpoints.
        free_bytes: Free where the run directory is; None if unknown, which refuses nothing.
        config: Configuration of the attempt.
        overrides: Of the run: `disk` was overridden by one who knows that disk better.

    Raises:
        LocalResourceError: With what is free and what is needed.
    """
    need = estimate_run(config, None).checkpoint_bytes
    if free_bytes is None or "disk" in overrides or free_bytes >= need + RESERVE_BYTES:
        return
    place = f"pod `{run.pod}` with `{run.run_dir}`"
    message = describe_need(place, "a checkpoint of this run", need, free_bytes)
    pull = f"nsa-ops backup pull --checkpoint all {run.run_id}"
    prune = f"nsa-ops backup prune --on-pod --keep 1 {run.run_id}"
    hint = f"Free space there, such as with `{pull}`, then `{prune}`"
    raise LocalResourceError(message, hint=hint)


def with_parent(link: PodLink, manifest: RunManifest) -> RunManifest:
    """Verify the checkpoint to begin from, and name its run as the parent; once is enough."""
    if manifest.resume == "auto" or manifest.parent is not None:
        return manifest
    run = RunHandle(link, manifest.code_id, manifest.run_id)
    checkpoint = require_checkpoint(run, manifest.resume)
    refuse_other_model(checkpoint.path, manifest.config, link)
    refuse_trained(checkpoint.step, manifest.config)
    parent = Parent(
        run_id=checkpoint.run_id, step=checkpoint.step, attempt_id=checkpoint.attempt_id
    )
    return manifest.model_copy(update={"parent": parent, "resume": checkpoint.path})


def with_parent_as_planned(link: PodLink, manifest: RunManifest) -> RunManifest:
    """As `with_parent`, without shipping the code that hashes.

    A pod that does not have it yet is only asked whether the checkpoint is there; `with_parent`
    does the rest once the code is.
    """
    if manifest.resume == "auto":
        return manifest
    if has_code(link.transport, link.record.python, link.code(manifest.code_id)):
        return with_parent(link, manifest)
    folder = link.root / manifest.resume
    if link.transport.run(("test", "-d", str(folder)), timeout_s=QUICK_S).exit_code != 0:
        raise _missing(link, folder)
    return manifest


def _missing(link: PodLink, folder: PurePosixPath | str) -> NotFoundError:
    message = f"Checkpoint `{folder}` does not exist on pod `{link.record.name}`"
    return NotFoundError(message, hint="See what is there with `nsa-ops run show RUN`")
