"""What a bench runs on: card, clocks, versions, and the matrix product it reaches."""

import importlib.metadata

import torch

from nsa_core.bench.measure import time_runs
from nsa_core.rundir.bench_result import Machine
from nsa_core.train.card import card_uuid, number_of, query_card

_QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
_QUERY_S = 10.0
_MATMUL_SIZE = 8192


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
