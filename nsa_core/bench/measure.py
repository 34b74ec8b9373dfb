"""Time a function on the GPU and watch its memory."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_FLUSH_BYTES = 256 << 20  # more than any L2: no call finds its inputs in the cache
_GIB = 1 << 30


@dataclass(frozen=True)
class Timing:
    """Median of one function over several runs of many calls.

    Attributes:
        median_ms: Median of the runs' medians.
        spread: (slowest run - fastest run) / median.
    """

    median_ms: float
    spread: float


def time_runs(
    call: Callable[[], object],
    *,
    runs: int = 3,
    budget_ms: float = 150.0,
    leaves_clean: bool = False,
) -> Timing:
    """Time `call` with device events, caches flushed, in `runs` runs of about `budget_ms` each.

    Args:
        call: What is timed.
        runs: Whose medians are compared.
        budget_ms: Of each run.
        leaves_clean: Flush by reading instead of writing. A written cache has to go to the memory
            while `call` reads, which doubles the traffic of a call that reads no more than a cache
            holds.
    """
    medians = [_time_once(call, budget_ms, leaves_clean=leaves_clean) for _ in range(runs)]
    middle = statistics.median(medians)
    return Timing(middle, (max(medians) - min(medians)) / middle)


def _time_once(call: Callable[[], object], budget_ms: float, *, leaves_clean: bool) -> float:
    flush = torch.zeros(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    call()
    estimate_ms = _elapsed_ms(call)
    count = max(3, min(100, int(budget_ms / max(estimate_ms, 1e-3))))
    spans = []
    for _ in range(count):
        if leaves_clean:
            flush.amax()
        else:
            flush.zero_()
        spans.append(_record(call))
    torch.cuda.synchronize()
    return statistics.median(_length_ms(*span) for span in spans)


def _record(call: Callable[[], object]) -> tuple[torch.Event, torch.Event]:
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    return begin, end


def _length_ms(begin: torch.Event, end: torch.Event) -> float:
    return float(begin.elapsed_time(end))


def _elapsed_ms(call: Callable[[], object]) -> float:
    span = _record(call)
    torch.cuda.synchronize()
    return _length_ms(*span)


def peak_gib(call: Callable[[], object]) -> float:
    """Memory that one call takes at its peak, beyond what was allocated before it, in GiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / _GIB


def forward_backward(
    forward: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor
) -> Callable[[], object]:
    """A call of `forward` and of its gradient with respect to `inputs`."""

    def call() -> object:
        return torch.autograd.grad(forward(), inputs, grad)

    return call
