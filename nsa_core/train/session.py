"""Everything a running attempt holds, and the one place where its state becomes a snapshot."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from nsa_core.config.counts import count_flops
from nsa_core.config.run import RunConfig
from nsa_core.data.batch import TokenBatch
from nsa_core.data.loader import Loader, LoaderPlan, validation_batches
from nsa_core.data.staging import StagedData
from nsa_core.data.tokenizer import Tokenizer
from nsa_core.kernels.backend import BackendChoice
from nsa_core.model.transformer import LanguageModel
from nsa_core.recall.by_depth import Recall
from nsa_core.train.card import CardSampler, peak_flops_per_s
from nsa_core.train.checkpoint_files import (
    CheckpointOrigin,
    TrainingSnapshot,
    TrainingState,
)
from nsa_core.train.host_copies import HostCopies
from nsa_core.train.keeper import CheckpointKeeper
from nsa_core.train.learner import (
    Learner,
    choose_device,
    make_learner,
    require_recorded,
    set_up_torch,
)
from nsa_core.train.random_state import RandomState, gather_random, read_random_state
from nsa_core.train.resume import find_point, note_beginning, restore
from nsa_core.train.resume_point import ResumePoint, read_place, share_point
from nsa_core.train.run_data import open_data, require_same_data
from nsa_core.train.same_run import require_same_run
from nsa_core.train.step import StepRunner
from nsa_core.train.stop import StopWatch
from nsa_core.train.telemetry import AttemptContext, Telemetry
from nsa_core.train.timing import GoodputClock, Meter


@dataclass(frozen=True)
class Position:
    """Where the run stands between two steps; with the weights, all that a resume needs.

    Attributes:
        tokens_seen: Tokens consumed by all ranks.
        loader: The data cursor behind the last batch of these steps.
        unusable_steps: Skipped steps among the last hundred.
        random: Generators of this rank.
    """

    step: int
    tokens_seen: int
    loader: dict[str, object]
    unusable_steps: tuple[int, ...]
    random: RandomState


@dataclass
class TrainingSession:
    """A run that is ready to train; `position` is replaced after every step."""

    context: AttemptContext
    device: torch.device
    learner: Learner
    loader: Loader
    validation: Callable[[], Iterator[TokenBatch]]
    tokenizer: Tokenizer
    stop: StopWatch
    clock: GoodputClock
    keeper: CheckpointKeeper
    meter: Meter
    card: CardSampler
    kernels: tuple[BackendChoice, ...]
    position: Position
    host: HostCopies
    recall: Recall | None = None
    num_good: int = 0
    num_skipped: int = 0
    overflows_in_row: int = 0
    sync_s: float = 0.0

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.context.manifest.config

    @property
    def model(self) -> LanguageModel:
        """What is trained."""
        return self.learner.model

    @property
    def steps(self) -> StepRunner:
        """What trains it."""
        return self.learner.steps

    @property
    def telemetry(self) -> Telemetry:
        """Where the attempt reports."""
        return self.context.telemetry

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.position.step

    def advance(self, tokens: int, unusable_steps: tuple[int, ...]) -> None:
        """Move to the boundary behind the step that was just done or skipped."""
        self.position = read_position(
            self.step + 1,
            self.position.tokens_seen + tokens,
            self.loader.state.model_dump(),
            unusable_steps,
            self.device,
        )
        self.context.beats.advance(step=self.step)

    def snapshot(self) -> TrainingSnapshot | None:
        """A copy of what this rank writes of the state at the last step boundary, in host memory.

        Every rank takes part. Where each keeps the whole state, rank 0 alone writes something.
        """
        position, scaler, place = self.position, self.steps.scaler, self.context.group.place
        if self.learner.shards is None:
            random = dict(enumerate(gather_random(self.context.group, position.random)))
            if not place.is_first:
                return None
        else:
            random = {place.rank: position.random}
        state = self.steps.optimizers.state_tensors()
        layout = self.learner.shards.layout(state) if self.learner.shards else None
        if layout is not None:
            state = {name: state[name] for name in layout.optimizer}
        copies = self.host.copy({"model": self.learner.weights(), "optimizer": state})
        return TrainingSnapshot(
            state=TrainingState(
                step=position.step,
                tokens_seen=position.tokens_seen,
                loader=position.loader,
                loss_scaler=scaler.state_dict() if scaler is not None else None,
                unusable_steps=list(position.unusable_steps),
                step_seconds=self.clock.seconds("step"),
            ),
            config=self.config,
            model=copies["model"],
            optimizer=copies["optimizer"],
            random=random,
            layout=layout,
        )


def read_position(
    step: int,
    tokens_seen: int,
    loader: dict[str, object],
    unusable_steps: tuple[int, ...],
    device: torch.device,
) -> Position:
    """The position with the generators as they are now."""
    return Position(
        step=step,
        tokens_seen=tokens_seen,
        loader=loader,
        unusable_steps=unusable_steps,
        random=read_random_state(device),
    )


def prepare(context: AttemptContext, stop: StopWatch, clock: GoodputClock) -> TrainingSession:
    """Everything that has to be done before the first step.

    Raises:
        TrainerConfigurationError: If this machine cannot run the configuration, or the ranks do not
            have the same.
        CheckpointError: If there are checkpoints and none can be loaded.
        DataError: If the data cannot be used.
        StopAskedError: If a stop is asked for; nothing has been trained then.
    """
    config = context.manifest.config
    group = context.group
    require_same_run(group, context.manifest)
    device = choose_device(config, group.place)
    set_up_torch(config, device, group.place.rank)
    point = share_point(group, find_point(context) if group.is_first else None)
    staged = open_data(context, stop, point)
    require_same_data(group, staged.manifest_sha256)
    learner = make_learner(config, device, group=group)
    require_recorded(context.manifest, learner.model.backends.choices)
    if point is not None:
        restore(point, learner, staged.tokenizer, device, group)
    plan = _loader_plan(context, device)
    loader = _make_loader(context, staged, point, plan)
    context.beats.advance(step=point.state.step if point else 0)
    card = CardSampler(device)
    context.beats.sample = card.sample
    keeper = _make_keeper(context, clock, staged)
    note_beginning(context, clock, keeper, point)
    session = TrainingSession(
        context=context,
        device=device,
        learner=learner,
        loader=loader,
        validation=partial(
            validation_batches,
            staged,
            plan,
            config.evaluation.eval_batches,
            pack_documents=config.data.pack_documents,
        ),
        tokenizer=staged.tokenizer,
        stop=stop,
        clock=clock,
        keeper=keeper,
        meter=Meter(
            count_flops(config.model, config.batch.seq_len).train,
            peak_flops_per_s(device, config.runtime.precision),
            num_ranks=group.size,
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
        host=_make_host_copies(context, learner, device),
    )
    _announce(session)
    return session


def _make_host_copies(
    context: AttemptContext, learner: Learner, device: torch.device
) -> HostCopies:
    """Room for weights and moments, pinned now: the first save would wait for it."""
    telemetry = context.telemetry
    host = HostCopies(device, lambda why: telemetry.event("not_pinned", why, of_rank=True))
    if context.group.is_first or learner.shards is not None:  # who writes something
        moments = learner.steps.optimizers.expected_moments()
        host.reserve([*learner.weights().values(), *moments])
    return host


def _announce(session: TrainingSession) -> None:
    """Report what will be trained, how many tokens a step has, and which kernels run and why."""
    batch = session.config.batch
    flops = count_flops(session.config.model, batch.seq_len).train
    parameters = session.model.num_parameters()
    session.telemetry.event(
        "prepared",
        f"{parameters:,} parameters on {session.device}; {batch.micro_batch} x "
        f"{batch.accumulation} rows of {batch.seq_len} tokens = {batch.tokens_per_step:,} tokens a "
        f"step{_share(session)}; {flops:.3g} FLOPs a token",
        parameters=parameters,
        tokens_per_step=batch.tokens_per_step,
        train_flops_per_token=flops,
        kernels={one.branch: f"{one.name}: {one.reason}" for one in session.kernels},
    )


def _share(session: TrainingSession) -> str:
    ranks = session.context.group.size
    how = "each with its part of the state" if session.learner.shards else "each with all state"
    return f", shared by {ranks} ranks, {how}" if ranks > 1 else ""


def _loader_plan(context: AttemptContext, device: torch.device) -> LoaderPlan:
    config = context.manifest.config
    return LoaderPlan(
        seq_len=config.batch.seq_len,
        micro_batch=config.batch.micro_batch,
        seed=config.seed,
        rank=context.group.place.rank,
        world_size=context.group.size,
        calls_per_step=config.batch.accumulation // context.group.size,
        is_pinned=device.type == "cuda",
    )


def _make_loader(
    context: AttemptContext, staged: StagedData, point: ResumePoint | None, plan: LoaderPlan
) -> Loader:
    """The loader behind the last batch of the checkpoint.

    A run that began from another run's checkpoint may have other data; it then begins at the
    first sample of its own. A run never loses its place in its own data.
    """
    config = context.manifest.config
    state = read_place(point) if point else None
    if point is not None and state is not None and not point.is_own:
        begun = Loader(staged, config.data, plan)
        place = {"epoch", "global_sample"}
        if begun.state.model_dump(exclude=place) != state.model_dump(exclude=place):
            context.telemetry.event(
                "data_restarted", "the parent trained on other data: from sample 0"
            )
            return begun
        begun.close()
    return Loader(staged, config.data, plan, state)


def _make_keeper(
    context: AttemptContext, clock: GoodputClock, staged: StagedData
) -> CheckpointKeeper:
    manifest = context.manifest
    origin = CheckpointOrigin(
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        attempt_id=manifest.attempt_id,
        config_sha256=manifest.config_sha256,
        tokenizer_fingerprint=staged.tokenizer.fingerprint,
    )
    return CheckpointKeeper(
        context.run,
        manifest.config.checkpoint,
        origin,
        context.telemetry,
        clock,
        context.group,
        rank_deadline_s=manifest.config.runtime.collective_timeout_s,
    )
