"""Training written a second time: a few lines in float64, each document alone, formulas as printed.

Of the project it uses the forward pass of the model, its initial weights and the order of the
samples, which have tests of their own. Data, borders, targets, loss, clipping, schedule, AdamW
(arXiv 1711.05101, algorithm 2) and Muon (Jordan et al. 2024) are its own.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.config.run import RunConfig
from nsa_core.data.loader import Permutation
from nsa_core.model.transformer import LanguageModel

END = 256
MUON_MOMENTUM = 0.95


@dataclass
class StepFigures:
    """What a step gave: mean nats of a valid token, norm before clipping, learning rate."""

    loss: float
    norm: float
    rate: float


def rate_scale(config: RunConfig, step: int) -> float:
    """Share of the peak in the optimizer step that has `step` steps before it."""
    plan = config.schedule
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    left = plan.steps - 1 - step
    if plan.kind == "cosine":
        turn = math.pi * left / (plan.steps - 1 - plan.warmup_steps)
        return plan.min_ratio + (1 - plan.min_ratio) * (1 - math.cos(turn)) / 2
    if plan.kind == "wsd":
        share = min(1.0, left / round(plan.steps * plan.decay_fraction))
        return plan.min_ratio + (1 - plan.min_ratio) * share
    return 1.0


def training_row(config: RunConfig, texts: Sequence[str]) -> list[int]:
    """Bytes of the documents that are not held out, each with an end token, one after the other."""
    row: list[int] = []
    num_staged = 0
    for text in texts:
        content = text.encode()
        if 0 < config.data.max_tokens <= num_staged:
            break
        num_staged += len(content) + 1
        share = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
        if share >= config.data.validation_fraction:
            row += [*content, END]
    assert len(row) < num_staged, "no document is held out: the trainer would move the bound"
    return row


def documents_of(sample: list[int], config: RunConfig) -> list[tuple[list[int], list[int | None]]]:
    """Inputs and targets of each document of a sample; None where nothing is to be predicted."""
    length = config.batch.seq_len
    inputs, targets = sample[:length], [*sample[1:], None][:length]
    wanted = [None if token == END else t for token, t in zip(inputs, targets, strict=False)]
    if not config.data.pack_documents:
        return [(inputs, wanted)]
    borders = [0, *(i + 1 for i, token in enumerate(inputs[:-1]) if token == END), len(inputs)]
    return [(inputs[a:b], wanted[a:b]) for a, b in itertools.pairwise(borders)]


class Float64Loop:
    """The weights, moments and figures that a run should have.

    Attributes:
        weights: By name.
        state: `exp_avg`, `exp_avg_sq` and `momentum_buffer` by `parameter/key`.
        muon: What was made orthogonal in the last step, and the rate of each direction, by name.
    """

    def __init__(self, config: RunConfig, texts: Sequence[str]) -> None:
        self.config = config
        self._model = LanguageModel(config.model, seed=config.seed).double()
        self.weights = dict(self._model.named_parameters())
        self.state: dict[str, Tensor] = {}
        self.muon: dict[str, tuple[Tensor, float]] = {}
        self._row = training_row(config, texts)
        self._num_samples = math.ceil((len(self._row) - 1) / config.batch.seq_len)
        self.num_steps = 0

    def samples(self) -> list[list[int]]:
        """The samples of the next step."""
        batch, length = self.config.batch, self.config.batch.seq_len
        count = batch.micro_batch * batch.accumulation
        places = range(self.num_steps * count, (self.num_steps + 1) * count)
        numbers = [
            Permutation(self._num_samples, self.config.seed, p // self._num_samples)(
                p % self._num_samples
            )
            for p in places
        ]
        return [self._row[n * length : (n + 1) * length + 1] for n in numbers]

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Mean loss over the valid tokens of the next step, and its gradient."""
        parts = [part for sample in self.samples() for part in documents_of(sample, self.config)]
        count = sum(target is not None for _, targets in parts for target in targets)
        total = torch.zeros((), dtype=torch.float64)
        for inputs, targets in parts:
            log_p = self._model(torch.tensor([inputs]))[0].log_softmax(dim=-1)
            for place, target in enumerate(targets):
                if target is not None:
                    total = total - log_p[place, target]
        loss = total / count
        found = torch.autograd.grad(loss, list(self.weights.values()), materialize_grads=True)
        return loss.item(), dict(zip(self.weights, found, strict=True))

    def go_on_from(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a trainer, so that its rounding is not that of the next step too."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])

    def step(self) -> StepFigures:
        """One optimizer step."""
        loss, gradients = self.gradients()
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        shrink = min(1.0, self.config.optimizer.clip_norm / norm)
        scale = rate_scale(self.config, self.num_steps)
        self.num_steps += 1
        with torch.no_grad():
            for name, gradient in gradients.items():
                if self.config.optimizer.kind == "muon" and is_muon(name):
                    self._muon(name, gradient * shrink, scale)
                else:
                    self._adamw(name, gradient * shrink, scale)
        return StepFigures(loss, norm, self.config.optimizer.learning_rate * scale)

    def _decay(self, name: str, rate: float) -> None:
        decay = self.config.optimizer.weight_decay if is_decayed(name) else 0.0
        self.weights[name].mul_(1 - rate * decay)

    def _adamw(self, name: str, gradient: Tensor, scale: float) -> None:
        plan, t = self.config.optimizer, self.num_steps
        zero = torch.zeros_like(gradient)
        m = self.state.get(f"{name}/exp_avg", zero) * plan.beta1 + gradient * (1 - plan.beta1)
        v = self.state.get(f"{name}/exp_avg_sq", zero) * plan.beta2 + gradient**2 * (1 - plan.beta2)
        self.state |= {f"{name}/exp_avg": m, f"{name}/exp_avg_sq": v}
        rate = plan.learning_rate * scale
        self._decay(name, rate)
        m_hat, v_hat = m / (1 - plan.beta1**t), v / (1 - plan.beta2**t)
        self.weights[name].sub_(rate * m_hat / (v_hat.sqrt() + plan.eps))

    def _muon(self, name: str, gradient: Tensor, scale: float) -> None:
        """Nesterov momentum, five Newton-Schulz steps, and the scale of a tall matrix."""
        key = f"{name}/momentum_buffer"
        before = self.state.get(key, torch.zeros_like(gradient))
        momentum = MUON_MOMENTUM * before + (1 - MUON_MOMENTUM) * gradient
        self.state[key] = momentum
        rate = self.config.optimizer.muon_learning_rate * scale
        self._decay(name, rate)
        ahead = MUON_MOMENTUM * momentum + (1 - MUON_MOMENTUM) * gradient
        rows, columns = gradient.shape
        tall = math.sqrt(max(1.0, rows / columns))
        self.muon[name] = (ahead, rate * tall)
        self.weights[name].sub_(rate * tall * orthogonal(ahead))


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz: the singular values of a matrix come near 1, its directions stay."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    if x.shape[0] > x.shape[1]:
        x = x.mT
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if x.shape == matrix.shape else x.mT


def is_decayed(name: str) -> bool:
    """Matrices are decayed; norms, biases and the tables of embeddings and positions are not."""
    return not name.endswith(("norm.weight", ".bias", "embedding.weight", "position_LD"))


def is_muon(name: str) -> bool:
    """Matrices inside the blocks belong to Muon, those of the gates excepted."""
    return is_decayed(name) and name.startswith("blocks.") and ".gate." not in name
