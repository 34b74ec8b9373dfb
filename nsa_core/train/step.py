"""One optimizer step: gradients of all micro-batches, clip, and an update only if it is sound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa_core.config.training import Precision
from nsa_core.data.batch import TokenBatch
from nsa_core.evaluate.device import autocast, move
from nsa_core.kernels.packing import Packing
from nsa_core.model.loss import LossSum
from nsa_core.train.judgement import find_fault
from nsa_core.train.optimizer import OptimizerSet

LossFunction = Callable[[Tensor, Tensor, Packing], LossSum]


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: Mean loss over the valid tokens of all micro-batches, in nats.
        grad_norm: Norm before clipping, as clipping returned it.
        fault: Why the weights were left alone; None for a good step.
        is_overflow: The fault is a gradient that fp16 could not hold: the scale falls.
        loss_scale: fp16 loss scale after the step; None in other precisions.
    """

    loss: float
    grad_norm: float
    fault: str | None
    is_overflow: bool = False
    loss_scale: float | None = None


@dataclass
class StepRunner:
    """Runs steps on one model.

    Attributes:
        loss: The model's loss, compiled or not.
        optimizers: What updates its weights.
        clip_norm: Largest norm of the gradient.
        precision: bf16 and fp16 run under autocast.
        device: Where the model lives.
        scaler: fp16 gradient scaler; None in other precisions.
    """

    loss: LossFunction
    optimizers: OptimizerSet
    clip_norm: float
    precision: Precision
    device: torch.device
    scaler: torch.amp.GradScaler | None = None

    def run(self, batches: Sequence[TokenBatch], poll: Callable[[int], None]) -> StepResult:
        """Accumulate, clip and update.

        Args:
            batches: All micro-batches of the step.
            poll: Called with the number of micro-steps done, before each further one. It may
                raise; the weights are then as they were before the step.
        """
        num_valid = sum(batch.num_targets for batch in batches)
        total = torch.zeros((), device=self.device)
        self.optimizers.zero_grad()
        for number, batch in enumerate(batches):
            if number:
                poll(number)
            with autocast(self.device, self.precision):
                loss_sum = self.loss(*move(batch, self.device)).sum
            self._backward(loss_sum / max(1, num_valid))
            total += loss_sum.detach()
        return self._finish(total / max(1, num_valid), num_valid)

    def _backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own

    def _finish(self, loss: Tensor, num_valid: int) -> StepResult:
        if self.scaler is not None:
            for optimizer in self.optimizers.torch_optimizers:
                self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self.optimizers.parameters, self.clip_norm)
        numbers = torch.stack([loss.float(), norm.float()])
        if self.scaler is None and self.optimizers.can_hold_back and num_valid:
            # queued before the wait for the numbers, so that the card need not wait for the host
            self.optimizers.step(_is_unsound(numbers))
            self.optimizers.zero_grad()
            loss_value, norm_value = numbers.tolist()
            return StepResult(loss_value, norm_value, find_fault(loss_value, norm_value, num_valid))
        loss_value, norm_value = numbers.tolist()
        fault = find_fault(loss_value, norm_value, num_valid)
        if fault is None:
            self.optimizers.step()
        self.optimizers.zero_grad()
        if self.scaler is None:
            return StepResult(loss_value, norm_value, fault)
        self.scaler.update()
        has_good_loss = find_fault(loss_value, 1.0, num_valid) is None
        return StepResult(
            loss_value,
            norm_value,
            fault,
            is_overflow=fault is not None and has_good_loss and norm_value != 0.0,
            loss_scale=self.scaler.get_scale(),
        )


def _is_unsound(numbers: Tensor) -> Tensor:
    """1.0 where `find_fault` would name a fault of loss or gradient norm, else 0.0; no waiting."""
    return ((~numbers.isfinite()) | (numbers == 0)).any().float()
