"""Time a function on the GPU, watch its memory, and describe the machine."""

import importlib.metadata
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.rundir.bench_result import Machine
from nsa_core.train.card import card_uuid, number_of, query_card

_FLUSH_BYTES = 256 << 20  # more than any L2: no call finds its inputs in the cache
_GIB = 1 << 30
_QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
_QUERY_S = 10.0
_MATMUL_SIZE = 8192


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


def allocated_gib(device: torch.device) -> float | None:
    """Most memory that was allocated since `reset_peak`, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Begin to watch the memory of a device anew."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def forward_backward(
    forward: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor
) -> Callable[[], object]:
    """A call of `forward` and of its gradient with respect to `inputs`."""

    def call() -> object:
        return torch.autograd.grad(forward(), inputs, grad)

    return call


def describe_machine() -> Machine:
    """Card, memory, clocks and versions; no host name.

    On a card, a matrix product is timed first, so the clock is one under load.
    """
    torch_version, triton_version = torch.__version__, _version("triton")
    if not torch.cuda.is_available():
        return Machine(card="cpu", torch=torch_version, triton=triton_version)
    matmul_tflops = round(measure_matmul_tflops(), 1)
    device = torch.device("cuda", 0)
    card = torch.cuda.get_device_properties(device)
    return Machine(
        card=card.name,
        multiprocessors=card.multi_processor_count,
        memory_gib=round(card.total_memory / 2**30, 1),
        torch=torch_version,
        triton=triton_version,
        cuda=torch.version.cuda,
        matmul_tflops=matmul_tflops,
        **parse_clocks(query_card(card_uuid(device), ",".join(_QUERY), _QUERY_S)),
    )


def measure_matmul_tflops() -> float:
    """Rate of a large square bf16 product, in TFLOP/s."""
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    timing = time_runs(lambda: torch.mm(left, right, out=out))
    return 2 * _MATMUL_SIZE**3 / (timing.median_ms * 1e9)


def parse_clocks(line: str) -> dict[str, str | float | None]:
    """Fields of `Machine` in one line of `nvidia-smi --format=csv,noheader,nounits`; pure."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_QUERY):
        cells = [""] * len(_QUERY)
    driver = cells[0] if cells[0][:1].isdigit() else None
    names = ("clock_mhz", "max_clock_mhz", "memory_clock_mhz", "power_limit_w")
    return {"driver": driver} | dict(zip(names, map(number_of, cells[1:]), strict=True))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
