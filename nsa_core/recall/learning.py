"""Teach a small model associative recall, then take its selected branch away.

The choice of blocks carries no gradient: it can only be learned through the compressed branch,
which scores the blocks and is trained by the same question. Recipes are in `recipes`.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from nsa_core.config.model import ModelConfig
from nsa_core.config.training import Precision
from nsa_core.evaluate.ablation import cut_branches, only_forced_blocks
from nsa_core.evaluate.device import autocast
from nsa_core.kernels.backend import BranchBackends
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import WEIGHT_STD
from nsa_core.recall.task import JUDGED_SEED, RecallTask, draw_recall, recall_accuracy

#: Steps between two measurements of a stage.
MEASURE_EVERY = 25
#: Queries of such a measurement, about.
MEASURED_QUERIES = 512


@dataclass(frozen=True)
class Stage:
    """Train on one kind of rows until they are known or the steps are used up.

    Attributes:
        steps: At most so many.
        enough: Accuracy at which the next stage begins; above 1, no measurement ends it early.
        rate: Share of the recipe's learning rate.
        is_cooling: The learning rate falls linearly to 0 over the steps of this stage.
        trains_last_layer_only: All else keeps its weights, the embedding too.
        cut_every: Without the selected branch in each of so many steps; 0 for never. The compressed
            branch then has to help to answer, and learns which block is the right one.
    """

    task: RecallTask
    batch: int
    steps: int
    enough: float = 0.98
    rate: float = 1.0
    is_cooling: bool = False
    trains_last_layer_only: bool = False
    cut_every: int = 0


@dataclass(frozen=True)
class RecallRecipe:
    """A model and its lessons, easiest rows first.

    Attributes:
        model: Its vocabulary is at least the tasks'.
        stages: In their order.
        judged: Rows that the model is judged by afterwards.
        learning_rate: After the warm-up, and until a stage cools.
        warmup_steps: Linear, at the very beginning.
        seed: Of weights and rows, below `JUDGED_SEED`: the rows of the judgement are never learned.
        limit_s: Seconds after which each stage left takes one step more: a runaway ends, and a
            machine that is merely busy learns the same as an idle one.
    """

    model: ModelConfig
    stages: tuple[Stage, ...]
    judged: tuple[RecallTask, ...]
    learning_rate: float = 5e-3
    warmup_steps: int = 50
    seed: int = 0
    limit_s: float = 240.0

    def __post_init__(self) -> None:
        """Refuse a seed that could draw the rows of the judgement."""
        if not 0 <= self.seed < JUDGED_SEED:
            message = (
                f"the seed of a recipe must be 0 or more and below {JUDGED_SEED:,}, not {self.seed}"
            )
            raise ValueError(message)


@dataclass(frozen=True)
class Progress:
    """One measurement during training."""

    stage: int
    seq_len: int
    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Lesson:
    """The model after training, and how it came there."""

    model: LanguageModel
    history: tuple[Progress, ...]


@dataclass(frozen=True)
class RecallFigures:
    """Accuracy of one model on one kind of rows.

    Attributes:
        without_selection: With the gate of the selected branch at 0; None for a dense model.
        without_choice: With the forced blocks only; None for a dense model.
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
    precision: Precision = "fp32",
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Lesson:
    """Train a model through the stages."""
    training = _Training(recipe, device, backends, precision, on_progress)
    for number, stage in enumerate(recipe.stages):
        training.run(number, stage)
    training.train_all()
    return Lesson(training.model, tuple(training.history))


@dataclass(eq=False)
class _Training:
    recipe: RecallRecipe
    device: torch.device
    backends: BranchBackends | None
    precision: Precision
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

    def run(self, number: int, stage: Stage) -> None:
        """Train until the stage is known, its steps are done, or the time is up."""
        self.train_all()
        if stage.trains_last_layer_only:
            self.model.requires_grad_(requires_grad=False)
            self.model.block_list[-1].requires_grad_(requires_grad=True)
        for step in count(1):
            cooled = 1 - (step - 1) / stage.steps if stage.is_cooling else 1.0
            with self._cut(stage, step):
                loss = self._step(stage, stage.rate * cooled)
            is_last = step >= stage.steps or self._seconds() >= self.recipe.limit_s
            if is_last or step % MEASURE_EVERY == 0:
                progress = self._measure(number, stage, float(loss))
                if is_last or progress.accuracy >= stage.enough:
                    return

    def train_all(self) -> None:
        """Every weight learns again."""
        self.model.requires_grad_(requires_grad=True)

    def _cut(self, stage: Stage, step: int) -> AbstractContextManager[None]:
        is_cut = stage.cut_every and step % stage.cut_every == 0
        is_cut = is_cut and self.model.config.attention == "nsa"
        return cut_branches(self.model, "selected") if is_cut else nullcontext()

    def _step(self, stage: Stage, share: float) -> torch.Tensor:
        drawn = draw_recall(stage.task, stage.batch, self.generator)
        self.steps_done += 1
        warm = min(1.0, self.steps_done / self.recipe.warmup_steps)
        rate = self.recipe.learning_rate * warm * share
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with autocast(self.device, self.precision):
            total = self.model.loss(
                drawn.tokens_BT.to(self.device), drawn.targets_BT.to(self.device)
            )
        mean = total.sum / total.count
        self.optimizer.zero_grad()
        torch.autograd.backward(mean)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return mean.detach()

    def _measure(self, number: int, stage: Stage, loss: float) -> Progress:
        rows = -(-MEASURED_QUERIES // stage.task.num_queries)
        with autocast(self.device, self.precision):
            accuracy = recall_accuracy(self.model, stage.task, rows=rows, batch=stage.batch)
        progress = Progress(
            number, stage.task.seq_len, self.steps_done, loss, accuracy, round(self._seconds(), 1)
        )
        self.history.append(progress)
        self.on_progress(progress)
        return progress

    def _seconds(self) -> float:
        return time.monotonic() - self.started_s


@torch.no_grad()
def _widen(model: LanguageModel) -> None:
    """Scale the matrices from std 0.02, meant for wide models, to 1 / sqrt(dim)."""
    factor = model.config.dim**-0.5 / WEIGHT_STD
    for info in model.parameter_infos():
        if info.parameter.ndim == 2 and "phi" not in info.name:
            info.parameter.mul_(factor)


def judge_recall(
    model: LanguageModel,
    task: RecallTask,
    *,
    rows: int,
    batch: int = 8,
    precision: Precision = "fp32",
) -> RecallFigures:
    """Accuracy on fresh rows: whole, without the selected branch, and without its free choice."""

    def accuracy() -> float:
        with autocast(model.embedding.weight.device, precision):
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
