"""One optimizer step: gradients of all micro-batches, clip, and an update only if it is sound."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nsa_core.config.training import Precision
from nsa_core.data.batch import TokenBatch
from nsa_core.evaluate.device import autocast, move
from nsa_core.kernels.packing import Packing
from nsa_core.model.loss import LossSum
from nsa_core.train.group import RankGroup
from nsa_core.train.optimizer import OptimizerSet

WINDOW_STEPS = 100


def find_fault(loss: float, grad_norm: float, num_valid: int) -> str | None:
    """Why a step must be skipped: its loss or gradient is missing, not finite or exactly 0.

    Args:
        loss: Mean loss over the valid tokens in nats.
        grad_norm: Norm that clipping returned.
        num_valid: Valid target tokens of the step on all ranks.
    """
    if num_valid == 0:
        return "the loss is missing: the batch has no valid target"
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if value == 0.0:
            return f"the {name} is exactly 0"
    return None


def recent(unusable_steps: Sequence[int], step: int) -> list[int]:
    """The skipped steps among the last `WINDOW_STEPS`."""
    return [skipped for skipped in unusable_steps if step - skipped < WINDOW_STEPS]


def find_breach(
    unusable_steps: Sequence[int], step: int, *, in_row: int, in_100: int
) -> str | None:
    """Why the run must end after this step, or None: too many in a row or in a hundred.

    Args:
        unusable_steps: Steps that were skipped, ascending; `step` may be the last.
        step: The step just tried.
        in_row: How many in a row end the run.
        in_100: How many in 100 steps end the run.
    """
    skipped = set(unusable_steps)
    if all(step - back in skipped for back in range(in_row)):
        return f"{in_row} steps in a row had no usable loss or gradient"
    if step in skipped and len(recent(unusable_steps, step)) >= in_100:
        return f"{in_100} of {WINDOW_STEPS} steps had no usable loss or gradient"
    return None


LossFunction = Callable[[Tensor, Tensor, Packing], LossSum]
#: While it is entered, forward and backward keep their gradients from the other ranks.
Hold = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: Mean loss over the valid tokens of all micro-batches, in nats.
        grad_norm: Norm before clipping, as clipping returned it.
        fault: Why the weights were left alone; None for a good step.
        is_overflow: The fault is a gradient that fp16 could not hold: the scale falls.
        loss_scale: fp16 loss scale after the step; None in other precisions.
        work_s: Seconds of this rank's own computing before it first waits for others; None where it
            is alone.
    """

    loss: float
    grad_norm: float
    fault: str | None
    is_overflow: bool = False
    loss_scale: float | None = None
    work_s: float | None = None


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
        group: The ranks that share a step.
        clip: Clips to a norm and returns the norm before; by default that of the gradients here.
    """

    loss: LossFunction
    optimizers: OptimizerSet
    clip_norm: float
    precision: Precision
    device: torch.device
    scaler: torch.amp.GradScaler | None = None
    group: RankGroup = field(default_factory=RankGroup)
    hold: Hold = nullcontext
    clip: Callable[[float], Tensor] | None = None

    def run(
        self,
        batches: Sequence[TokenBatch],
        poll: Callable[[int], None],
        num_valid: int | None = None,
    ) -> StepResult:
        """Accumulate, clip and update.

        Args:
            batches: All micro-batches of this rank in the step.
            poll: Called with the number of micro-steps done, before each further one. It may
                raise; the weights are then as they were before the step.
            num_valid: Valid target tokens of the step on all ranks; by default those of `batches`.
        """
        if num_valid is None:
            num_valid = sum(batch.num_targets for batch in batches)
        work = WorkTimer(self.device) if self.group.size > 1 else None
        loss = self._accumulate(batches, num_valid, poll, work)
        if self.scaler is not None:
            for optimizer in self.optimizers.torch_optimizers:
                self.scaler.unscale_(optimizer)
        norm = self._clip()
        numbers = torch.stack([loss.float(), norm.float()])
        is_queued = self.scaler is None and self.optimizers.can_hold_back and num_valid > 0
        if (
            is_queued
        ):  # before the wait for the numbers, so that the card need not wait for the host
            self.optimizers.step(_is_unsound(numbers))
            self.optimizers.zero_grad()
        loss_value, norm_value = numbers.tolist()
        work_s = work.read_s() if work is not None else None
        fault = find_fault(loss_value, norm_value, num_valid)
        if is_queued:
            return StepResult(loss_value, norm_value, fault, work_s=work_s)
        if fault is None:
            self.optimizers.step()
        self.optimizers.zero_grad()
        if self.scaler is None:
            return StepResult(loss_value, norm_value, fault, work_s=work_s)
        self.scaler.update()
        has_good_loss = find_fault(loss_value, 1.0, num_valid) is None
        return StepResult(
            loss_value,
            norm_value,
            fault,
            is_overflow=fault is not None and has_good_loss and norm_value != 0.0,
            loss_scale=self.scaler.get_scale(),
            work_s=work_s,
        )

    def _clip(self) -> Tensor:
        if self.clip is not None:
            return self.clip(self.clip_norm)
        return nn.utils.clip_grad_norm_(self.optimizers.parameters, self.clip_norm)

    def _accumulate(
        self,
        batches: Sequence[TokenBatch],
        num_valid: int,
        poll: Callable[[int], None],
        work: "WorkTimer | None",
    ) -> Tensor:
        """Gradients of the mean loss over all valid tokens; returns that loss in nats."""
        total = torch.zeros((), device=self.device)
        self.optimizers.zero_grad()
        for number, batch in enumerate(batches):
            if number:
                with work.paused() if work is not None else nullcontext():
                    poll(number)
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else self.hold():
                with autocast(self.device, self.precision):
                    loss_sum = self.loss(*move(batch, self.device)).sum
                if is_last and work is not None:
                    work.stop()
                # the ranks' gradients are averaged: hence the number of ranks
                self._backward(loss_sum / (max(1, num_valid) / self.group.size))
            total += loss_sum.detach()
        self.group.sum_in_place(total)
        return total / max(1, num_valid)

    def _backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own


class WorkTimer:
    """Seconds of a rank's own work in a step, by the device's own clock; waits are left out."""

    def __init__(self, device: torch.device) -> None:
        self._is_card = device.type == "cuda"
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun_s = self._seconds = 0.0
        self._begin()

    def stop(self) -> None:
        """The work has been done, or on a card it has been queued."""
        if self._is_card:
            self._marks[-1][1].record()
        else:
            self._seconds += time.monotonic() - self._begun_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the ranks agree on in the body takes as long as the slowest of them needs."""
        self.stop()
        yield
        self._begin()

    def read_s(self) -> float:
        """Seconds; on a card only once it was waited for."""
        if self._is_card:
            return sum(float(begun.elapsed_time(done)) for begun, done in self._marks) / 1e3
        return self._seconds

    def _begin(self) -> None:
        if self._is_card:
            self._marks.append((_new_event(), _new_event()))
            self._marks[-1][0].record()
        else:
            self._begun_s = time.monotonic()


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def _is_unsound(numbers: Tensor) -> Tensor:
    """1.0 where `find_fault` would name a fault of loss or gradient norm, else 0.0; no waiting."""
    return ((~numbers.isfinite()) | (numbers == 0)).any().float()
