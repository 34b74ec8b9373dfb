"""Find the checkpoint a run continues from, and load it: the newest whole one, or an error."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from nsa_core.config.base import one_line
from nsa_core.config.compare import differing_values, other_model
from nsa_core.config.run import RunConfig
from nsa_core.data.tokenizer import Tokenizer
from nsa_core.model.stored_tensors import find_stored, read_stored
from nsa_core.model.weights import copy_tensors
from nsa_core.rundir.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    Checkpoint,
    inspect_checkpoint,
    read_checkpoint,
)
from nsa_core.rundir.events import find_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import CHECKPOINT_NAME, RunDir
from nsa_core.rundir.lineage import find_foreign, find_not_own
from nsa_core.rundir.manifest import AFRESH, AUTO, ManifestError, RunManifest, read_manifest
from nsa_core.train import checkpoint_files as content
from nsa_core.train.failure import CheckpointError
from nsa_core.train.group import RankGroup
from nsa_core.train.keeper import CheckpointKeeper
from nsa_core.train.learner import Learner
from nsa_core.train.parallel import share_state
from nsa_core.train.random_state import (
    RandomState,
    restore_random_state,
    seed_everything,
    spread_random,
)
from nsa_core.train.resume_point import ResumePoint
from nsa_core.train.telemetry import AttemptContext
from nsa_core.train.timing import GoodputClock

Reject = Callable[[Path, str], None]


def find_resume_point(run: RunDir, manifest: RunManifest, reject: Reject) -> ResumePoint | None:
    """The newest whole checkpoint that this attempt may continue from; None for a fresh start.

    Args:
        run: Where its own checkpoints are.
        manifest: Its `resume` is `auto`, `afresh`, or the path of a checkpoint or another run.
        reject: Called with each checkpoint that cannot be used and the reason, newest first: it is
            damaged, or neither this run nor its parent wrote it.

    Raises:
        CheckpointError: If the named path has no checkpoint, no candidate can be used, or the run
            has saved checkpoints and none is left.
    """
    if manifest.resume == AFRESH:
        return None
    named = manifest.resume != AUTO
    first_attempt = _find_first_attempt(run, manifest)
    candidates = _candidates(run, first_attempt)
    if not candidates:
        _refuse_if_lost(run, manifest, first_attempt)
    if named:
        candidates += _named_candidates(Path(manifest.resume))
    reasons: list[str] = []
    for folder in candidates:
        found = _verify(folder, run, manifest)
        if isinstance(found, ResumePoint):
            return found
        reasons.append(found)
        reject(folder, found)
    if candidates:
        message = (
            f"all {len(candidates)} checkpoints are damaged or of another run, newest "
            f"{candidates[0].name}: {reasons[0]}"
        )
        raise CheckpointError(
            message,
            hint="Restore one with `nsa-ops backup restore`, or launch a new run",
        )
    return None


def _find_first_attempt(run: RunDir, manifest: RunManifest) -> int:
    """The first attempt whose checkpoints this one may continue from.

    That is the last one that began afresh. Where a path is named, attempts that only restart one
    another share it, and their own checkpoints come before those of the path.
    """
    named = manifest.resume != AUTO
    for attempt in range(manifest.attempt - 1, 0, -1):
        resume = _read_resume(run, attempt)
        if named and resume != manifest.resume:
            return attempt + 1
        if resume == AFRESH:
            return attempt
    return 1


def _read_resume(run: RunDir, attempt: int) -> str | None:
    """What an earlier attempt continued from; None where its manifest cannot be used."""
    try:
        return read_manifest(RunDir(run.attempt(attempt))).resume
    except (ManifestError, OSError):
        return None


def _refuse_if_lost(run: RunDir, manifest: RunManifest, first_attempt: int) -> None:
    """Raise CheckpointError where these attempts recorded a checkpoint: none may begin again."""
    steps = [
        step
        for event in find_events(run, "saved")
        if event.attempt >= first_attempt and isinstance(step := event.facts.get("step"), int)
    ]
    for attempt in range(first_attempt, manifest.attempt):
        ended = read_exit(RunDir(run.attempt(attempt)))
        steps.append(ended.checkpoint_step or 0 if ended else 0)
    newest = max(steps, default=0)
    if newest:
        message = (
            f"{run.run_id} has saved a checkpoint of step {newest}, and {run.checkpoints} holds "
            "none: to begin again would lose that work silently"
        )
        raise CheckpointError(
            message,
            hint="Bring one back with `nsa-ops backup restore`, or begin at the first step with "
            f"`nsa-ops resume {run.run_id} --afresh`",
        )


def _candidates(run: RunDir, first_attempt: int) -> list[Path]:
    """Checkpoint folders of these attempts, newest step first; no manifest is damage, not absence.

    Steps order them rightly because `set_aside_later` takes an abandoned future out of the way.
    """
    found = []
    for folder in _list_folder(run.checkpoints):
        match = CHECKPOINT_NAME.fullmatch(folder.name)
        if match is None:
            continue
        readable = read_checkpoint(folder)
        if readable is None or readable.manifest.attempt >= first_attempt:
            found.append((int(match.group(1)), folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _list_folder(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none, CheckpointError if it cannot be read."""
    if not folder.is_dir():
        return []
    try:
        return list(folder.iterdir())
    except OSError as error:
        message = f"{folder} cannot be read: {error.strerror}"
        raise CheckpointError(message, hint="Look at `dmesg` and the disk, then resume") from error


def _named_candidates(path: Path) -> list[Path]:
    if not path.is_dir():
        message = f"`{path}` is no checkpoint folder, so there is nothing to resume from"
        raise CheckpointError(message, hint="List what there is with `nsa-ops run show RUN`")
    if CHECKPOINT_NAME.fullmatch(path.name) or (path / content.STATE_FILE).exists():
        return [path]
    inside = _candidates(RunDir(path), 1)
    if not inside:
        message = f"`{path}` holds no checkpoint, so there is nothing to resume from"
        raise CheckpointError(message, hint="Name a run directory or a folder like step_000500")
    return inside


def _verify(folder: Path, run: RunDir, manifest: RunManifest) -> ResumePoint | str:
    """The checkpoint in a folder, or why this run cannot go on from it."""
    seen = inspect_checkpoint(folder, with_hashes=False)
    if seen.manifest is None or seen.manifest.fault is not None:  # its claims may be endless
        return seen.damage
    found = Checkpoint(folder, seen.manifest)
    foreign = _find_foreign(found, run, manifest)
    if foreign is not None:
        return foreign
    needed = (*found.manifest.tensor_files, content.STATE_FILE, CONFIG_FILE)
    listed = {file.name for file in found.manifest.files}
    missing = next((name for name in needed if name not in listed), None)
    if missing is not None:
        return f"checkpoint.json does not list {missing}"
    damage = seen.damage or inspect_checkpoint(folder).damage
    return damage or _open(found, is_own=_is_in(run, folder))


def _is_in(run: RunDir, folder: Path) -> bool:
    """Whether a checkpoint is one of the run directory's, whichever path names it."""
    return folder.parent.resolve() == run.checkpoints.resolve()


def _find_foreign(found: Checkpoint, run: RunDir, manifest: RunManifest) -> str | None:
    """Why neither this run nor its parent wrote a checkpoint; None if one of them did.

    A manifest may name the checkpoint of another run and no parent. The manifest of the directory
    that holds it then says whether it is what it claims to be.
    """
    if _is_in(run, found.path):
        return find_not_own(found.manifest, manifest)
    foreign = find_foreign(found.manifest, manifest)
    if foreign is None or manifest.parent is not None:
        return foreign
    try:
        holder = read_manifest(RunDir(found.path.parent.parent))
    except (ManifestError, OSError):
        return foreign
    return foreign if holder.run_id == manifest.run_id else find_not_own(found.manifest, holder)


def _open(found: Checkpoint, *, is_own: bool) -> ResumePoint | str:
    try:
        state, config = content.read_state(found.path), content.read_config(found.path)
    except (ValueError, OSError) as error:
        return f"its content cannot be read: {one_line(error)}"
    if state.step != found.step:
        return f"checkpoint.json says step {found.step}, its state is step {state.step}"
    return ResumePoint(
        path=found.path, manifest=found.manifest, state=state, config=config, is_own=is_own
    )


def set_aside_later(run: RunDir, step: int, attempt: int) -> list[str]:
    """Rename checkpoints after the resumed step, so that the steps done again can be saved.

    They are damaged, or belong to a future that a rollback abandoned; nothing is deleted.
    """
    moved = []
    for folder in sorted(_list_folder(run.checkpoints)):
        match = CHECKPOINT_NAME.fullmatch(folder.name)
        if match and int(match.group(1)) > step:
            target = folder.with_name(f"aside_attempt{attempt}_{folder.name}")
            while target.exists():
                target = target.with_name(f"{target.name}_again")
            folder.rename(target)
            moved.append(target.name)
    return moved


def require_same_model(point: ResumePoint, config: RunConfig) -> None:
    """Raise CheckpointError if a field of `model` differs; the first is named."""
    other = other_model(point.config, config)
    if other is not None:
        message = f"{point.path.name} is of another model: {other}"
        raise CheckpointError(
            message, hint="Resume with the configuration that the checkpoint was trained with"
        )


def find_point(context: AttemptContext) -> ResumePoint | None:
    """The verified checkpoint this attempt continues from; those that are skipped are events.

    Raises:
        CheckpointError: If there are candidates and none can be used.
    """
    for name, problem in content.remove_leftovers(context.run):
        kind = "unreadable" if problem else "leftover_removed"
        context.telemetry.event(kind, f"{name} was left half written{problem}")

    def reject(folder: Path, why: str) -> None:
        context.telemetry.event(
            "checkpoint_rejected", f"{folder.name} cannot be used: {why}", path=str(folder)
        )

    point = find_resume_point(context.run, context.manifest, reject)
    if point is not None:
        require_same_model(point, context.manifest.config)
        context.beats.advance(step=point.state.step)
    return point


def restore(
    point: ResumePoint,
    learner: Learner,
    tokenizer: Tokenizer,
    device: torch.device,
    group: RankGroup,
) -> None:
    """Load a verified checkpoint, of any number of ranks, into the learner and the generators.

    Rank 0 reads it for all, or each rank the rows that it keeps.

    Raises:
        CheckpointError: If it is of another tokenizer, or does not fit this model.
    """
    folder, manifest = point.path, point.manifest
    if manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        message = f"{folder.name} was trained with another tokenizer than {tokenizer.name}"
        raise CheckpointError(message, hint="Resume with the tokenizer of the checkpoint")
    is_reader = group.is_first or learner.shards is not None
    states = _load(point, learner) if is_reader else []
    if learner.shards is None:
        share_state(learner.model, learner.steps.optimizers, device, group)
    random = spread_random(group, states)
    if random is not None:
        _restore_random(folder.name, random, device)
    else:  # fewer ranks wrote it
        seed_everything(point.config.seed, group.place.rank)
    if learner.steps.scaler is not None and point.state.loss_scaler is not None:
        learner.steps.scaler.load_state_dict(point.state.loss_scaler)


def _load(point: ResumePoint, learner: Learner) -> list[RandomState]:
    """Load weights and optimizer state; the random generators of every rank that wrote it."""
    folder, manifest = point.path, point.manifest
    try:
        shards = learner.shards
        stored = find_stored(folder, manifest, MODEL_FILE)
        copy_tensors(learner.weights(), read_stored(stored, shards.rows if shards else None))
        stored = find_stored(folder, manifest, OPTIMIZER_FILE)
        wanted = shards.wanted_state(stored) if shards else None
        learner.steps.optimizers.load_state_tensors(read_stored(stored, wanted))
        return content.read_random(folder, manifest)
    except SafetensorError as error:
        raise _unusable(folder.name, str(error)) from error
    except (ValueError, OSError) as error:
        raise _unusable(folder.name, one_line(error)) from error


def _restore_random(name: str, state: RandomState, device: torch.device) -> None:
    """Put the generators back; what is no state of one is an error of many types."""
    try:
        restore_random_state(state, device)
    except (ValueError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise _unusable(name, f"it holds no state of a generator: {why}") from error


def _unusable(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} cannot be loaded: {why}", hint="Resume from another checkpoint")


def note_beginning(
    context: AttemptContext,
    clock: GoodputClock,
    keeper: CheckpointKeeper,
    point: ResumePoint | None,
) -> None:
    """Put tables, clock and keeper at the step the run continues from, and report which it is."""
    telemetry = context.telemetry
    step = point.state.step if point else 0
    continues = point is not None and point.is_own
    is_first = context.group.is_first
    kept = step if continues else step - 1  # its own of this step is of another past
    moved = set_aside_later(context.run, kept, context.manifest.attempt) if is_first else []
    telemetry.continue_from(step)
    clock.lose_steps(point.state.step_seconds if point and continues else 0.0)
    last_anomaly = max(point.state.unusable_steps, default=None) if point else None
    keeper.begin_at(step, last_anomaly, is_own=continues)
    context.beats.advance(step=step)
    if moved:
        telemetry.event("set_aside", f"checkpoints from step {kept + 1} on: {', '.join(moved)}")
    if point is None:
        if context.manifest.attempt > 1:
            asked = context.manifest.resume == AFRESH
            why = "as was asked for" if asked else "there was no checkpoint yet"
            telemetry.event("resumed", f"from step 0: {why}", step=0)
        return
    differences = [str(one) for one in differing_values(point.config, context.manifest.config)]
    changed = f"; changed: {'; '.join(differences)}" if differences else ""
    telemetry.event(
        "resumed",
        f"from step {step} of {point.path}{changed}",
        step=step,
        path=str(point.path),
        run_id=point.manifest.run_id,
        differences=differences,
    )
