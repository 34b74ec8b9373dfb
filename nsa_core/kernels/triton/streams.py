"""Run independent kernels beside each other: one fills the gaps that the other leaves.

Streams are forked and joined with events on the device; nothing waits on the host, and a CUDA graph
captures the fork. On a CPU everything runs in order.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@cache
def _side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    del purpose  # one stream each
    return torch.cuda.Stream(device)


def run_beside(
    device: torch.device,
    side: Callable[[], tuple[Tensor, ...]],
    main: Callable[[], Result],
) -> tuple[tuple[Tensor, ...], Result]:
    """Call `side` on a second stream and `main` on the current one.

    The two must not write what the other touches.
    """
    if device.type != "cuda":
        return side(), main()
    current, other = torch.cuda.current_stream(device), _side_stream(device, "beside")
    other.wait_stream(current)
    with torch.cuda.stream(other):
        beside = side()
    result = main()
    current.wait_stream(other)
    for tensor in beside:
        tensor.record_stream(current)
    return beside, result


def run_pipelined(
    device: torch.device,
    count: int,
    produce: Callable[[int, int], None],
    consume: Callable[[int, int], None],
) -> None:
    """Call produce(i, buffer), then consume(i, buffer) for i < count, with two buffers in turn.

    While item i is consumed on a second stream, item i + 1 is produced on the current one.
    """
    if device.type != "cuda":
        for i in range(count):
            produce(i, i % 2)
            consume(i, i % 2)
        return
    current, other = torch.cuda.current_stream(device), _side_stream(device, "pipeline")
    consumed: list[torch.cuda.Event] = []
    for i in range(count):
        if i >= 2:
            current.wait_event(consumed[i - 2])
        produce(i, i % 2)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            consume(i, i % 2)
        consumed.append(other.record_event())
    current.wait_stream(other)
