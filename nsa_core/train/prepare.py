"""Make a session out of a manifest: device, data, model, optimizer, and the state to go on from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import deterministic

from nsa_core.config.counts import count_flops
from nsa_core.config.run import RunConfig
from nsa_core.data.batch import LoaderState, TokenBatch
from nsa_core.data.loader import Loader, LoaderPlan
from nsa_core.data.progress import StageProgress
from nsa_core.data.staging import StagedData, stage
from nsa_core.data.validation import validation_batches
from nsa_core.evaluate.forward import COMPUTE_DTYPE
from nsa_core.kernels.dispatch import choose_backends, device_facts
from nsa_core.model.transformer import LanguageModel
from nsa_core.train import checkpoint as content
from nsa_core.train.card import CardSampler, peak_flops_per_s
from nsa_core.train.checkpoint import Origin
from nsa_core.train.context import AttemptContext
from nsa_core.train.failure import CheckpointError, ConfigurationError
from nsa_core.train.goodput import GoodputClock
from nsa_core.train.keeper import CheckpointKeeper
from nsa_core.train.meter import Meter
from nsa_core.train.optimizer import OptimizerSet
from nsa_core.train.random_state import (
    restore_host_state,
    restore_torch_state,
    seed_everything,
)
from nsa_core.train.resume import (
    ResumePoint,
    find_differences,
    find_resume_point,
    require_same_model,
    set_aside_later,
)
from nsa_core.train.saver import CheckpointSaver
from nsa_core.train.session import Session, read_position
from nsa_core.train.step import StepRunner
from nsa_core.train.stop import StopWatch
from nsa_core.train.telemetry import Telemetry


@dataclass(frozen=True)
class Learner:
    """What learns: the model and what updates it."""

    model: LanguageModel
    steps: StepRunner


def prepare(
    context: AttemptContext, telemetry: Telemetry, stop: StopWatch, clock: GoodputClock
) -> Session:
    """Everything that has to be done before the first step.

    Raises:
        ConfigurationError: If this machine cannot run the configuration.
        CheckpointError: If there are checkpoints and none can be loaded.
        DataError: If the data cannot be used.
        StopAskedError: If a stop is asked for meanwhile; nothing has been trained then.
    """
    config = context.manifest.config
    device = choose_device(config)
    set_up_torch(config, device)
    point = _find_point(context, telemetry)
    staged = _stage(context, telemetry, stop)
    learner = _make_learner(config, device)
    if point is not None:
        _restore(point, learner, staged, config, device, context.rank.rank)
    loader = _make_loader(context, staged, point)
    card = CardSampler(device)
    context.beats.sample = card.sample
    keeper = _make_keeper(context, telemetry, clock, staged)
    _note_beginning(context, telemetry, clock, keeper, point)
    plan = _loader_plan(context)
    return Session(
        context=context,
        config=config,
        device=device,
        model=learner.model,
        steps=learner.steps,
        loader=loader,
        validation=_validation_of(staged, plan, config),
        tokenizer=staged.tokenizer,
        telemetry=telemetry,
        stop=stop,
        clock=clock,
        keeper=keeper,
        meter=Meter(
            count_flops(config.model, config.batch.seq_len).train,
            peak_flops_per_s(device, config.runtime.precision),
        ),
        card=card,
        kernel_paths={choice.branch: choice.name for choice in learner.model.backends.choices},
        position=read_position(
            point.state.step if point else 0,
            point.state.tokens_seen if point else 0,
            loader.state.model_dump(),
            tuple(point.state.unusable_steps) if point else (),
            device,
        ),
    )


def choose_device(config: RunConfig) -> torch.device:
    """The device of this process.

    Raises:
        ConfigurationError: If there is no card where one is asked for.
    """
    wanted = config.runtime.device
    has_card = torch.cuda.is_available()
    if wanted == "cuda" and not has_card:
        message = "runtime.device is cuda, and torch sees no CUDA card here"
        raise ConfigurationError(message, hint="Look at `nvidia-smi`, or set runtime.device=cpu")
    device = torch.device("cuda" if has_card and wanted != "cpu" else "cpu")
    if config.runtime.precision == "fp16" and device.type != "cuda":
        message = "runtime.precision fp16 needs a CUDA card, and the device is cpu"
        raise ConfigurationError(message, hint="Set runtime.precision=fp32")
    return device


def set_up_torch(config: RunConfig, device: torch.device) -> None:
    """Threads, determinism and seeds; on a CPU repeats are always equal bit for bit."""
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    if config.runtime.deterministic or device.type == "cpu":
        torch.use_deterministic_algorithms(mode=True)
        # B010: torch gives this module a class of its own, which a type checker cannot see
        setattr(deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.set_float32_matmul_precision("high" if config.runtime.precision != "fp32" else "highest")
    seed_everything(config.seed)


def _find_point(context: AttemptContext, telemetry: Telemetry) -> ResumePoint | None:
    for name in content.remove_leftovers(context.run):
        telemetry.event("leftover_removed", f"{name} was left half written by a kill")

    def reject(folder: Path, damage: str) -> None:
        telemetry.event(
            "checkpoint_rejected", f"{folder.name} is damaged: {damage}", path=str(folder)
        )

    point = find_resume_point(context.run, context.manifest, reject)
    if point is not None:
        require_same_model(point, context.manifest.config)
    return point


def _stage(context: AttemptContext, telemetry: Telemetry, stop: StopWatch) -> StagedData:
    """Open the data, staging it first; a stop is noticed meanwhile."""
    config = context.manifest.config
    last_doing = ""

    def progress(report: StageProgress) -> None:
        nonlocal last_doing
        stop.check()
        context.beats.advance()
        if report.doing != last_doing:
            last_doing = report.doing
            context.log.tell(f"data: {report.line()}")

    context.beats.enter("data")
    staged = stage(config.data, pod_root(context.run.root), config.seed, progress)
    context.beats.enter("init")
    if staged.substituted_synthetic:
        telemetry.event(
            "data_substituted", f"random words instead of the data: {staged.substitution_reason}"
        )
    if staged.tokenizer.vocab_size > config.model.vocab_size:
        message = (
            f"the tokenizer has {staged.tokenizer.vocab_size} ids and model.vocab_size is "
            f"{config.model.vocab_size}"
        )
        raise ConfigurationError(message, hint="Raise model.vocab_size")
    return staged


def pod_root(run_root: Path) -> Path:
    """The folder that holds `runs/`; relative data folders lie below it."""
    return run_root.parent.parent if run_root.parent.name == "runs" else run_root.parent


def _make_learner(config: RunConfig, device: torch.device) -> Learner:
    precision = config.runtime.precision
    try:
        backends = choose_backends(config.runtime, device_facts(device, COMPUTE_DTYPE[precision]))
    except ValueError as error:
        raise ConfigurationError(str(error), hint="Set runtime.backend=auto") from error
    model = LanguageModel(config.model, backends, seed=config.seed).to(device)
    model.activation_checkpointing = config.runtime.activation_checkpointing
    return Learner(
        model,
        StepRunner(
            loss=torch.compile(model.loss) if config.runtime.compile else model.loss,
            optimizers=OptimizerSet(model.parameter_infos(), config.optimizer, device),
            clip_norm=config.optimizer.clip_norm,
            precision=precision,
            device=device,
            scaler=torch.amp.GradScaler(device.type) if precision == "fp16" else None,
        ),
    )


def _restore(
    point: ResumePoint,
    learner: Learner,
    staged: StagedData,
    config: RunConfig,
    device: torch.device,
    rank: int,
) -> None:
    """Load a verified checkpoint into the learner and the random generators."""
    folder, manifest = point.checkpoint.path, point.checkpoint.manifest
    if manifest.tokenizer_fingerprint != staged.tokenizer.fingerprint:
        message = f"{folder.name} was trained with another tokenizer than {config.data.tokenizer}"
        raise CheckpointError(message, hint="Resume with the tokenizer of the checkpoint")
    try:
        content.load_model_tensors(learner.model, content.read_tensors(folder, content.MODEL_FILE))
        learner.steps.optimizers.load_state_tensors(
            content.read_tensors(folder, content.OPTIMIZER_FILE)
        )
        restore_host_state(content.read_random_words(folder, rank))
        restore_torch_state(content.read_tensors(folder, content.random_tensors_file(rank)), device)
    except (ValueError, OSError) as error:
        message = f"{folder.name} cannot be loaded: {error}"
        raise CheckpointError(message, hint="Resume from another checkpoint") from error
    if learner.steps.scaler is not None and point.state.loss_scaler is not None:
        learner.steps.scaler.load_state_dict(point.state.loss_scaler)


def _loader_plan(context: AttemptContext) -> LoaderPlan:
    config = context.manifest.config
    return LoaderPlan(
        seq_len=config.batch.seq_len,
        micro_batch=config.batch.micro_batch,
        seed=config.seed,
        rank=context.rank.rank,
        world_size=context.rank.world_size,
    )


def _make_loader(context: AttemptContext, staged: StagedData, point: ResumePoint | None) -> Loader:
    state = LoaderState.model_validate(point.state.loader) if point else None
    return Loader(staged, context.manifest.config.data, _loader_plan(context), state)


def _validation_of(
    staged: StagedData, plan: LoaderPlan, config: RunConfig
) -> Callable[[], Iterator[TokenBatch]]:
    def batches() -> Iterator[TokenBatch]:
        return validation_batches(
            staged,
            plan,
            config.evaluation.eval_batches,
            pack_documents=config.data.pack_documents,
        )

    return batches


def _make_keeper(
    context: AttemptContext, telemetry: Telemetry, clock: GoodputClock, staged: StagedData
) -> CheckpointKeeper:
    config, manifest = context.manifest.config, context.manifest
    origin = Origin(
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        config_sha256=manifest.config_sha256,
        tokenizer_fingerprint=staged.tokenizer.fingerprint,
    )
    saver = CheckpointSaver(context.run, origin, background=config.checkpoint.background)
    return CheckpointKeeper(context.run, config.checkpoint, saver, telemetry, clock)


def _note_beginning(
    context: AttemptContext,
    telemetry: Telemetry,
    clock: GoodputClock,
    keeper: CheckpointKeeper,
    point: ResumePoint | None,
) -> None:
    """Put tables, clock and keeper at the step the run goes on from, and say which that is."""
    step = point.state.step if point else 0
    is_own = point is not None and point.checkpoint.path.parent == context.run.checkpoints
    moved = set_aside_later(context.run, step, context.manifest.attempt)
    telemetry.continue_from(step)
    clock.lose_steps(point.state.step_seconds if point and is_own else 0.0)
    last_anomaly = max(point.state.unusable_steps, default=None) if point else None
    keeper.begin_at(step, last_anomaly, is_own=is_own)
    context.beats.advance(step=step)
    if moved:
        telemetry.event("set_aside", f"checkpoints after step {step}: {', '.join(moved)}")
    if point is None:
        if context.manifest.attempt > 1:
            telemetry.event("resumed", "there was no checkpoint yet: from step 0", step=0)
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
