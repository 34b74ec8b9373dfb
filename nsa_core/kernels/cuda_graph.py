"""Record the launches of a call once, to be replayed without the host."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

#: Calls before the capture: kernels are compiled and libraries set up in them.
WARM_UP_CALLS = 2


def capture(
    call: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a call a few times beside the current stream, then record it.

    Returns:
        The graph, and what the recorded call returned: tensors that every replay fills anew.
    """
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # A data loader's thread may pin memory meanwhile: only this thread is watched.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return graph, result
