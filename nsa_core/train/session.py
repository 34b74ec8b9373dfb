"""Everything a running attempt holds, and the one place where its state becomes a snapshot."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.config.run import RunConfig
from nsa_core.data.batch import TokenBatch
from nsa_core.data.loader import Loader
from nsa_core.data.tokenizer import Tokenizer
from nsa_core.kernels.backend import BackendChoice
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import model_tensors
from nsa_core.recall.by_depth import Recall
from nsa_core.train.card import CardSampler
from nsa_core.train.checkpoint import Snapshot, TrainingState, to_host
from nsa_core.train.context import AttemptContext
from nsa_core.train.goodput import GoodputClock
from nsa_core.train.keeper import CheckpointKeeper
from nsa_core.train.meter import Meter
from nsa_core.train.random_state import HostRandomState, read_host_state, read_torch_state
from nsa_core.train.step import StepRunner
from nsa_core.train.stop import StopWatch
from nsa_core.train.telemetry import Telemetry


@dataclass(frozen=True)
class Position:
    """Where the run stands between two steps; with the weights, all that a resume needs.

    Attributes:
        step: Optimizer steps done.
        tokens_seen: Tokens consumed by all ranks.
        loader: The data cursor behind the last batch of these steps.
        unusable_steps: Skipped steps among the last hundred.
        random_words: Generators of Python and numpy.
        random_tensors: Generators of torch.
    """

    step: int
    tokens_seen: int
    loader: dict[str, object]
    unusable_steps: tuple[int, ...]
    random_words: HostRandomState
    random_tensors: dict[str, Tensor]


@dataclass
class Session:
    """A run that is ready to train; `position` is replaced after every step."""

    context: AttemptContext
    config: RunConfig
    device: torch.device
    model: LanguageModel
    steps: StepRunner
    loader: Loader
    validation: Callable[[], Iterator[TokenBatch]]
    tokenizer: Tokenizer
    telemetry: Telemetry
    stop: StopWatch
    clock: GoodputClock
    keeper: CheckpointKeeper
    meter: Meter
    card: CardSampler
    kernels: tuple[BackendChoice, ...]
    position: Position
    recall: Recall | None = None
    num_good: int = 0
    num_skipped: int = 0
    overflows_in_row: int = 0

    @property
    def kernel_paths(self) -> dict[str, str]:
        """Name of the backend of each branch, and of the kernel of the loss."""
        return self.model.kernel_paths

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

    def snapshot(self) -> Snapshot:
        """A copy of the state at the last step boundary, in host memory."""
        position, scaler = self.position, self.steps.scaler
        return Snapshot(
            state=TrainingState(
                step=position.step,
                tokens_seen=position.tokens_seen,
                loader=position.loader,
                loss_scaler=scaler.state_dict() if scaler is not None else None,
                unusable_steps=list(position.unusable_steps),
                step_seconds=self.clock.seconds("step"),
            ),
            config=self.config,
            model=to_host(model_tensors(self.model)),
            optimizer=to_host(self.steps.optimizers.state_tensors()),
            random_tensors=to_host(position.random_tensors),
            random_words=position.random_words,
            rank=self.context.rank.rank,
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
        random_words=read_host_state(),
        random_tensors=read_torch_state(device),
    )
