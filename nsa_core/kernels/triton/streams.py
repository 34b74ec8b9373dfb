"""Run independent kernels beside each other: one fills the gaps that the other leaves."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def run_beside(
    device: torch.device, side: Callable[[], object], main: Callable[[], Result]
) -> Result:
    """Call `side` on a second stream and `main` on the current one; returns what `main` returns.

    The streams fork and join on the device; nothing waits on the host, and a CUDA graph captures
    both. The two must not write what the other touches. What `side` leaves has to be in tensors
    allocated before, so that the allocator knows them as the current stream's.
    """
    if device.type != "cuda":
        side()
        return main()
    current, other = torch.cuda.current_stream(device), _side_stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        side()
    result = main()
    current.wait_stream(other)
    return result
