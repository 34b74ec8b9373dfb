"""StepFeed: the micro-batches of steps on the device, fetched and copied beside the compute.

The loss of a step is a mean over the targets of all its micro-batches, so a step begins only when
all of them are there. What can be fetched and copied ahead is the next step's: one micro-batch
whenever the work of one has been given to the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nsa_core.data.batch import LoaderState, TokenBatch


class BatchSource(Protocol):
    """What is used of `Loader`."""

    state: LoaderState

    def next_batch(self, poll: Callable[[], None]) -> TokenBatch:
        """The next batch; waits for it, and moves `state` behind it."""

    def ready_batch(self) -> TokenBatch | None:
        """The next batch if it is there; never waits, and does not move `state`."""


@dataclass(frozen=True)
class _Sent:
    """A batch whose tensors are on the device once the copy is done; None where it is done."""

    batch: TokenBatch
    copied: torch.cuda.Event | None


class StepFeed:
    """Hands out steps in the loader's order; `loader.state` stands behind the last one handed out.

    Args:
        loader: Where batches come from.
        device: Where the model is.
        num_batches: Micro-batches of a step.
    """

    def __init__(self, loader: BatchSource, device: torch.device, num_batches: int) -> None:
        self._loader = loader
        self._device = device
        self._num_batches = num_batches
        self._ahead: list[_Sent] = []
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
            if device.type == "cuda"
            else None
        )

    def take(self, poll: Callable[[], None]) -> list[TokenBatch]:
        """All micro-batches of the next step; waits for what was not fetched ahead.

        Args:
            poll: Called while waiting; what it raises loses no batch.

        Raises:
            DataError: If a batch does not come.
        """
        while len(self._ahead) < self._num_batches:
            self._ahead.append(self._send(self._loader.next_batch(poll)))
        step, self._ahead = self._ahead, []
        batches = [self._arrive(sent) for sent in step]
        last = batches[-1].state
        if last is not None:
            self._loader.state = last
        return batches

    def fetch_ahead(self) -> None:
        """Fetch one micro-batch of the next step, if it is ready and wanted; never waits."""
        if len(self._ahead) >= self._num_batches:
            return
        batch = self._loader.ready_batch()
        if batch is not None:
            self._ahead.append(self._send(batch))

    def _send(self, batch: TokenBatch) -> _Sent:
        """Begin the copy to the device from pinned memory, on a stream beside the model's."""
        if self._stream is None:
            return _Sent(batch, None)
        with torch.cuda.stream(self._stream):
            moved = replace(
                batch,
                tokens_BT=self._copy(batch.tokens_BT),
                targets_BT=self._copy(batch.targets_BT),
                cu_seqlens=self._copy(batch.cu_seqlens),
            )
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            copied.record(self._stream)
        return _Sent(moved, copied)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _arrive(self, sent: _Sent) -> TokenBatch:
        """The batch for the model's stream, which waits for the copy where it is not done."""
        if sent.copied is None:
            return sent.batch
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.copied)
        for tensor in (sent.batch.tokens_BT, sent.batch.targets_BT, sent.batch.cu_seqlens):
            tensor.record_stream(stream)  # or the side stream takes its memory for the next copy
        return sent.batch
