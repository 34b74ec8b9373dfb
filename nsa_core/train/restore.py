"""Put an attempt where the run stands: checkpoint, tables, clock, and a word about it."""

from pathlib import Path

import torch
from safetensors import SafetensorError

from nsa_core.data.tokenizer import Tokenizer
from nsa_core.model.weights import load_model_tensors
from nsa_core.rundir.checkpoint import MODEL_FILE
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import AFRESH
from nsa_core.train import checkpoint as content
from nsa_core.train.context import AttemptContext
from nsa_core.train.failure import CheckpointError
from nsa_core.train.goodput import GoodputClock
from nsa_core.train.keeper import CheckpointKeeper
from nsa_core.train.learner import Learner
from nsa_core.train.random_state import restore_host_state, restore_torch_state
from nsa_core.train.resume import (
    ResumePoint,
    find_differences,
    find_resume_point,
    require_same_model,
    set_aside_later,
)
from nsa_core.train.telemetry import Telemetry


def find_point(context: AttemptContext, telemetry: Telemetry) -> ResumePoint | None:
    """The verified checkpoint this attempt goes on from; those that are passed over are events.

    Raises:
        CheckpointError: If there are candidates and none can be used.
    """
    for name, problem in content.remove_leftovers(context.run):
        kind = "unreadable" if problem else "leftover_removed"
        telemetry.event(kind, f"{name} was left half written by a kill{problem}")

    def reject(folder: Path, why: str) -> None:
        telemetry.event(
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
    rank: int,
) -> None:
    """Load a verified checkpoint into the learner and the random generators.

    Raises:
        CheckpointError: If it is of another tokenizer, or does not fit this model.
    """
    folder, manifest = point.checkpoint.path, point.checkpoint.manifest
    if manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        message = f"{folder.name} was trained with another tokenizer than {tokenizer.name}"
        raise CheckpointError(message, hint="Resume with the tokenizer of the checkpoint")
    try:
        load_model_tensors(learner.model, content.read_tensors(folder, MODEL_FILE))
        learner.steps.optimizers.load_state_tensors(
            content.read_tensors(folder, content.OPTIMIZER_FILE)
        )
        restore_host_state(content.read_random_words(folder, rank))
        restore_torch_state(content.read_tensors(folder, content.random_tensors_file(rank)), device)
    except (ValueError, OSError, SafetensorError) as error:
        message = f"{folder.name} cannot be loaded: {error}"
        raise CheckpointError(message, hint="Resume from another checkpoint") from error
    if learner.steps.scaler is not None and point.state.loss_scaler is not None:
        learner.steps.scaler.load_state_dict(point.state.loss_scaler)


def is_own(run: RunDir, point: ResumePoint) -> bool:
    """Whether a checkpoint is the run's own and not its parent's."""
    return point.checkpoint.path.parent == run.checkpoints


def note_beginning(
    context: AttemptContext,
    telemetry: Telemetry,
    clock: GoodputClock,
    keeper: CheckpointKeeper,
    point: ResumePoint | None,
) -> None:
    """Put tables, clock and keeper at the step the run goes on from, and say which that is."""
    step = point.state.step if point else 0
    continues = point is not None and is_own(context.run, point)
    moved = set_aside_later(context.run, step, context.manifest.attempt)
    telemetry.continue_from(step)
    clock.lose_steps(point.state.step_seconds if point and continues else 0.0)
    last_anomaly = max(point.state.unusable_steps, default=None) if point else None
    keeper.begin_at(step, last_anomaly, is_own=continues)
    context.beats.advance(step=step)
    if moved:
        telemetry.event("set_aside", f"checkpoints after step {step}: {', '.join(moved)}")
    if point is None:
        if context.manifest.attempt > 1:
            asked = context.manifest.resume == AFRESH
            why = "as was asked for" if asked else "there was no checkpoint yet"
            telemetry.event("resumed", f"from step 0: {why}", step=0)
        return
    differences = find_differences(point.config, context.manifest.config)
    changed = f"; changed: {'; '.join(differences)}" if differences else ""
    telemetry.event(
        "resumed",
        f"from step {step} of {point.checkpoint.path}{changed}",
        step=step,
        path=str(point.checkpoint.path),
        run_id=point.checkpoint.manifest.run_id,
        differences=differences,
    )
