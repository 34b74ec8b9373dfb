"""Make a session out of a manifest: device, data, model, optimizer, and the state to go on from."""

from collections.abc import Callable, Iterator

import torch

from nsa_core.config.counts import count_flops
from nsa_core.config.run import RunConfig
from nsa_core.data.batch import LoaderState, TokenBatch
from nsa_core.data.loader import Loader, LoaderPlan, validation_batches
from nsa_core.data.staging import StagedData
from nsa_core.train.card import CardSampler, peak_flops_per_s
from nsa_core.train.checkpoint import Origin
from nsa_core.train.context import AttemptContext
from nsa_core.train.goodput import GoodputClock
from nsa_core.train.keeper import CheckpointKeeper
from nsa_core.train.kernel_record import require_recorded
from nsa_core.train.learner import choose_device, make_learner, set_up_torch
from nsa_core.train.meter import Meter
from nsa_core.train.restore import find_point, is_own, note_beginning, restore
from nsa_core.train.resume import ResumePoint
from nsa_core.train.run_data import open_data
from nsa_core.train.saver import CheckpointSaver
from nsa_core.train.session import Session, read_position
from nsa_core.train.stop import StopWatch
from nsa_core.train.telemetry import Telemetry


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
    device = choose_device(config, context.rank.world_size)
    set_up_torch(config, device)
    point = find_point(context, telemetry)
    staged = open_data(context, telemetry, stop, point)
    learner = make_learner(config, device)
    require_recorded(context.manifest, learner.model.backends.choices)
    if point is not None:
        restore(point, learner, staged.tokenizer, device, context.rank.rank)
    loader = _make_loader(context, telemetry, staged, point, device)
    card = CardSampler(device)
    context.beats.sample = card.sample
    keeper = _make_keeper(context, telemetry, clock, staged)
    note_beginning(context, telemetry, clock, keeper, point)
    session = Session(
        context=context,
        config=config,
        device=device,
        model=learner.model,
        steps=learner.steps,
        loader=loader,
        validation=_validation_of(staged, _loader_plan(context, device), config),
        tokenizer=staged.tokenizer,
        telemetry=telemetry,
        stop=stop,
        clock=clock,
        keeper=keeper,
        meter=Meter(
            count_flops(config.model, config.batch.seq_len).train,
            peak_flops_per_s(device, config.runtime.precision),
            num_warmup_steps=3 if config.runtime.compile else 1,  # a second shape compiles again
        ),
        card=card,
        kernels=learner.model.backends.choices,
        position=read_position(
            point.state.step if point else 0,
            point.state.tokens_seen if point else 0,
            loader.state.model_dump(),
            tuple(point.state.unusable_steps) if point else (),
            device,
        ),
    )
    _announce(session)
    return session


def _announce(session: Session) -> None:
    """Say what will be trained, how many tokens a step has, and which kernels run and why."""
    batch, world_size = session.config.batch, session.context.rank.world_size
    flops = count_flops(session.config.model, batch.seq_len).train
    parameters = session.model.num_parameters()
    session.telemetry.event(
        "prepared",
        f"{parameters:,} parameters on {session.device}; {batch.micro_batch} x "
        f"{batch.accumulation} x {world_size} rows of {batch.seq_len} tokens = "
        f"{batch.tokens_per_step(world_size):,} tokens a step; {flops:.3g} FLOPs a token",
        parameters=parameters,
        tokens_per_step=batch.tokens_per_step(world_size),
        train_flops_per_token=flops,
        kernels={one.branch: f"{one.name}: {one.reason}" for one in session.kernels},
    )


def _loader_plan(context: AttemptContext, device: torch.device) -> LoaderPlan:
    config = context.manifest.config
    return LoaderPlan(
        seq_len=config.batch.seq_len,
        micro_batch=config.batch.micro_batch,
        seed=config.seed,
        rank=context.rank.rank,
        world_size=context.rank.world_size,
        calls_per_step=config.batch.accumulation,
        is_pinned=device.type == "cuda",
    )


def _make_loader(
    context: AttemptContext,
    telemetry: Telemetry,
    staged: StagedData,
    point: ResumePoint | None,
    device: torch.device,
) -> Loader:
    """The loader behind the last batch of the checkpoint.

    A run that began from another run's checkpoint may have other data; it then begins at the
    first sample of its own. A run never loses its place in its own data.
    """
    config, plan = context.manifest.config, _loader_plan(context, device)
    state = LoaderState.model_validate(point.state.loader) if point else None
    if point is not None and state is not None and not is_own(context.run, point):
        begun = Loader(staged, config.data, plan)
        place = {"epoch", "global_sample"}
        if begun.state.model_dump(exclude=place) != state.model_dump(exclude=place):
            telemetry.event("data_restarted", "the parent trained on other data: from sample 0")
            return begun
        begun.close()
    return Loader(staged, config.data, plan, state)


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
        attempt_id=manifest.attempt_id,
        config_sha256=manifest.config_sha256,
        tokenizer_fingerprint=staged.tokenizer.fingerprint,
    )
    saver = CheckpointSaver(context.run, origin, background=config.checkpoint.background)
    return CheckpointKeeper(context.run, config.checkpoint, saver, telemetry, clock)
