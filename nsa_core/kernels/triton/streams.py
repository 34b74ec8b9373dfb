"""Run independent kernels beside each other: one fills the gaps that the other leaves."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def run_beside(
    device: torch.device,
    side: Callable[[], tuple[Tensor, ...]],
    main: Callable[[], Result],
) -> tuple[tuple[Tensor, ...], Result]:
    """Call `side` on a second stream and `main` on the current one, and join them on the device.

    The two must not write what the other touches. Nothing waits on the host.
    """
    if device.type != "cuda":
        return side(), main()
    current, other = torch.cuda.current_stream(device), _side_stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        beside = side()
    result = main()
    current.wait_stream(other)
    for tensor in beside:
        tensor.record_stream(current)
    return beside, result
