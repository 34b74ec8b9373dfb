"""Teach a small model associative recall, then take its selected branch away.

The choice of blocks carries no gradient: it can only be learned through the compressed branch,
which scores the blocks and is trained by the same question. Recipes are the caller's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from nsa_core.config.model import ModelConfig
from nsa_core.evaluate.ablation import cut_branches, only_forced_blocks
from nsa_core.evaluate.recall_task import RecallTask, draw_recall, recall_accuracy
from nsa_core.kernels.backend import BranchBackends
from nsa_core.model.initialise import WEIGHT_STD
from nsa_core.model.transformer import LanguageModel

#: A stage that has not begun to learn by itself is not measured more often than this.
MEASURE_EVERY = 50


@dataclass(frozen=True)
class Stage:
    """Train on one kind of rows until they are known or the steps are used up.

    Attributes:
        task: The rows.
        batch: Rows of a step.
        steps: At most so many.
        enough: Accuracy at which the next stage begins.
        is_cooling: The learning rate falls linearly to 0 over the steps of this stage.
    """

    task: RecallTask
    batch: int
    steps: int
    enough: float = 0.97
    is_cooling: bool = False


@dataclass(frozen=True)
class RecallRecipe:
    """A model and its lessons, shortest rows first.

    Attributes:
        model: Its vocabulary is at least the tasks'.
        stages: The last one is what the model is judged by.
        learning_rate: After the warm-up, and until a stage cools.
        warmup_steps: Linear, at the very beginning.
        seed: Of weights and rows.
        limit_s: Seconds after which training ends wherever it stands.
    """

    model: ModelConfig
    stages: tuple[Stage, ...]
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    seed: int = 0
    limit_s: float = 240.0


@dataclass(frozen=True)
class Progress:
    """One measurement during training."""

    seq_len: int
    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Lesson:
    """The model after training, and how it came there."""

    model: LanguageModel
    task: RecallTask
    history: tuple[Progress, ...]


@dataclass(frozen=True)
class RecallFigures:
    """Accuracy of one model on one kind of rows.

    Attributes:
        seq_len: Tokens of a row.
        accuracy: Of the whole model.
        without_selection: With the gate of the selected branch at 0; None for a dense model.
        without_choice: With the forced blocks only; None for a dense model.
        num_queries: Answers that were counted.
    """

    seq_len: int
    accuracy: float
    without_selection: float | None
    without_choice: float | None
    num_queries: int


def learn_recall(
    recipe: RecallRecipe,
    device: torch.device,
    *,
    backends: BranchBackends | None = None,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Lesson:
    """Train a model through the stages.

    Args:
        recipe: What and how.
        device: Where.
        backends: Of the branches; plain PyTorch if left out.
        autocast: Compute dtype; float32 if left out.
        on_progress: Called with every measurement.
    """
    training = _Training(recipe, device, backends, autocast, on_progress)
    for stage in recipe.stages:
        training.run(stage)
    return Lesson(training.model, recipe.stages[-1].task, tuple(training.history))


@dataclass(eq=False)
class _Training:
    recipe: RecallRecipe
    device: torch.device
    backends: BranchBackends | None
    dtype: torch.dtype | None
    on_progress: Callable[[Progress], None]
    history: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.model = LanguageModel(recipe.model, self.backends, seed=recipe.seed)
        _widen(self.model)
        self.model.to(self.device)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.steps_done = 0
        self.started_s = time.monotonic()

    def run(self, stage: Stage) -> None:
        """Train until the stage is known, its steps are done, or the time is up."""
        for step in count(1):
            share = 1 - (step - 1) / stage.steps if stage.is_cooling else 1.0
            loss = self._step(stage, share)
            is_last = step >= stage.steps or self._seconds() >= self.recipe.limit_s
            if is_last or step % MEASURE_EVERY == 0:
                progress = self._measure(stage, float(loss))
                if is_last or progress.accuracy >= stage.enough:
                    return

    def _step(self, stage: Stage, share: float) -> torch.Tensor:
        drawn = draw_recall(stage.task, stage.batch, self.generator)
        self.steps_done += 1
        warm = min(1.0, self.steps_done / self.recipe.warmup_steps)
        rate = self.recipe.learning_rate * warm * share
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with autocast_to(self.device, self.dtype):
            total = self.model.loss(
                drawn.tokens_BT.to(self.device), drawn.targets_BT.to(self.device)
            )
        mean = total.sum / total.count
        self.optimizer.zero_grad()
        torch.autograd.backward(mean)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return mean.detach()

    def _measure(self, stage: Stage, loss: float) -> Progress:
        rows = max(8, -(-256 // stage.task.num_queries))
        with autocast_to(self.device, self.dtype):
            accuracy = recall_accuracy(self.model, stage.task, rows=rows, batch=stage.batch)
        progress = Progress(
            stage.task.seq_len, self.steps_done, loss, accuracy, round(self._seconds(), 1)
        )
        self.history.append(progress)
        self.on_progress(progress)
        return progress

    def _seconds(self) -> float:
        return time.monotonic() - self.started_s


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to a dtype, or nothing."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


@torch.no_grad()
def _widen(model: LanguageModel) -> None:
    """Scale the matrices from std 0.02, meant for wide models, to 1 / sqrt(dim)."""
    factor = model.config.dim**-0.5 / WEIGHT_STD
    for info in model.parameter_infos():
        if info.parameter.ndim == 2 and "phi" not in info.name:
            info.parameter.mul_(factor)


def judge_recall(
    model: LanguageModel, task: RecallTask, *, rows: int = 32, batch: int = 8
) -> RecallFigures:
    """Accuracy on fresh rows: whole, without the selected branch, and without its free choice."""

    def accuracy() -> float:
        return recall_accuracy(model, task, rows=rows, batch=batch)

    whole = accuracy()
    without_selection = without_choice = None
    if model.config.attention == "nsa":
        with cut_branches(model, "selected"):
            without_selection = accuracy()
        with only_forced_blocks(model):
            without_choice = accuracy()
    num_queries = rows * task.num_queries
    return RecallFigures(task.seq_len, whole, without_selection, without_choice, num_queries)


def as_dense(recipe: RecallRecipe) -> RecallRecipe:
    """The same lessons for the dense control."""
    model = recipe.model.model_copy(update={"attention": "dense"})
    return replace(recipe, model=model)
