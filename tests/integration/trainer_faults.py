"""Faults that a test plants in a trainer's own process before it begins."""

import itertools
import os
import signal
import time
from typing import Any

import torch

from nsa_core.data.prefetch import Prefetcher
from nsa_core.evaluate import perplexity
from nsa_core.model.loss import LossSum
from nsa_core.model.transformer import LanguageModel
from nsa_core.train import run_data

#: Calls of the training loss per optimizer step in the tiny runs.
MICRO_STEPS = 2


def _change_loss(step: int, change: Any) -> None:
    """Apply `change` to the training losses from an optimizer step on (counted from 1)."""
    sound = LanguageModel.loss
    calls = itertools.count()

    def loss(self: LanguageModel, *inputs: Any) -> LossSum:
        found = sound(self, *inputs)
        if not torch.is_grad_enabled():
            return found
        return change(found, next(calls) // MICRO_STEPS + 1 - step)

    LanguageModel.loss = loss


def nan_once() -> None:
    """The loss of step 5 is NaN."""
    _change_loss(5, lambda found, past: _scaled(found, float("nan")) if past == 0 else found)


def nan_from_step_5() -> None:
    """Every loss from step 5 on is NaN."""
    _change_loss(5, lambda found, past: _scaled(found, float("nan")) if past >= 0 else found)


def _scaled(found: LossSum, factor: float) -> LossSum:
    return LossSum(found.sum * factor, found.count)


def out_of_memory_at_step_5() -> None:
    """The card has no memory left in step 5."""

    def change(found: LossSum, past: int) -> LossSum:
        if past >= 0:
            message = "CUDA out of memory. Tried to allocate 2.00 GiB"
            raise torch.OutOfMemoryError(message)
        return found

    _change_loss(5, change)


def bug_at_step_5() -> None:
    """A plain bug in step 5."""

    def change(found: LossSum, past: int) -> LossSum:
        if past >= 0:
            message = "list index out of range"
            raise IndexError(message)
        return found

    _change_loss(5, change)


def _build(number: int, fault: Any) -> None:
    sound = Prefetcher.__init__

    def init(self: Any, build: Any, depth: int, timeout_s: float) -> None:
        def faulty(call: int) -> Any:
            if call >= number:
                fault()
            return build(call)

        sound(self, faulty, depth, timeout_s)

    Prefetcher.__init__ = init  # type: ignore[method-assign]


def _fail() -> None:
    message = "Input/output error"
    raise OSError(5, message)


def data_fails_after_step_5() -> None:
    """The disk with the shards dies."""
    _build(5 * MICRO_STEPS, _fail)


def data_hangs_after_step_5() -> None:
    """A read of the shards never comes back."""
    _build(5 * MICRO_STEPS, lambda: time.sleep(3600))


def slow_evaluation() -> None:
    """Every validation batch takes a tenth of a second."""
    sound = perplexity.move

    def slow(*inputs: Any) -> Any:
        time.sleep(0.1)
        return sound(*inputs)

    perplexity.move = slow


def term_while_staging() -> None:
    """TERM arrives while the data is being staged, before the first step."""
    sound = run_data.stage

    def stage(*inputs: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return sound(*inputs, **more)

    run_data.stage = stage
