"""Time whole NSA and its branches beside dense attention, in one run, on the card that is here."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from nsa_core.bench.cases import DENSE_BACKENDS, SHAPES, Case, Shape, dense_case, nsa_cases
from nsa_core.bench.measure import forward_backward, peak_gib, time_runs


@dataclass(frozen=True)
class Row:
    """One shape at one length; times in ms, forward alone and forward with backward."""

    shape: str
    T: int
    tokens: int
    fwd_ms: float
    fwd_bwd_ms: float
    dense_cudnn_fwd_ms: float
    dense_cudnn_fwd_bwd_ms: float
    dense_flash_fwd_ms: float
    dense_flash_fwd_bwd_ms: float
    ratio_to_cudnn: float
    peak_gib: float
    dense_cudnn_peak_gib: float
    spread: float
    branches_ms: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class CaseResult:
    """Timings of one case."""

    fwd_ms: float
    fwd_bwd_ms: float
    peak_gib: float
    spread: float


@dataclass(frozen=True)
class Request:
    """What to time: names of shapes, lengths in tokens, tokens of a call."""

    shapes: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens: int
    dtype: torch.dtype
    runs: int


def run_case(case: Case, runs: int) -> CaseResult:
    """Time a case and take its peak memory."""
    both = forward_backward(case.forward, case.inputs, case.grad)
    both()
    peak = peak_gib(both)
    with torch.no_grad():
        forward = time_runs(case.forward, runs=runs)
    total = time_runs(both, runs=runs)
    return CaseResult(forward.median_ms, total.median_ms, peak, max(forward.spread, total.spread))


def measure_row(shape: Shape, length: int, request: Request) -> Row:
    """Time one shape at one length: dense first, NSA after it."""
    dense = {
        name: run_case(dense_case(name, shape, length, request.tokens, request.dtype), request.runs)
        for name in DENSE_BACKENDS
    }
    nsa = {
        case.name: run_case(case, request.runs)
        for case in nsa_cases(shape, length, request.tokens, request.dtype)
    }
    whole, cudnn, flash = nsa["nsa"], dense["cudnn"], dense["flash"]
    return Row(
        shape=shape.name,
        T=length,
        tokens=request.tokens,
        fwd_ms=whole.fwd_ms,
        fwd_bwd_ms=whole.fwd_bwd_ms,
        dense_cudnn_fwd_ms=cudnn.fwd_ms,
        dense_cudnn_fwd_bwd_ms=cudnn.fwd_bwd_ms,
        dense_flash_fwd_ms=flash.fwd_ms,
        dense_flash_fwd_bwd_ms=flash.fwd_bwd_ms,
        ratio_to_cudnn=whole.fwd_bwd_ms / cudnn.fwd_bwd_ms,
        peak_gib=whole.peak_gib,
        dense_cudnn_peak_gib=cudnn.peak_gib,
        spread=max(whole.spread, cudnn.spread),
        branches_ms={
            name: (result.fwd_ms, result.fwd_bwd_ms)
            for name, result in nsa.items()
            if name != "nsa"
        },
    )


def measure_rows(request: Request) -> Iterator[Row]:
    """Time every shape at every length."""
    for name in request.shapes:
        for length in request.lengths:
            yield measure_row(SHAPES[name], length, request)
            torch.cuda.empty_cache()


def describe_machine() -> dict[str, object]:
    """Card, memory, clock and versions."""
    card = torch.cuda.get_device_properties(0)
    return {
        "card": card.name,
        "multiprocessors": card.multi_processor_count,
        "memory_gib": round(card.total_memory / 2**30, 1),
        "clock_mhz": torch.cuda.clock_rate(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


HEADER = (
    f"{'shape':>5} {'T':>6} {'fwd':>7} {'fwd+bwd':>8} {'cudnn f':>8} {'cudnn fb':>9} "
    f"{'flash fb':>9} {'ratio':>6} {'GiB':>5} {'spread':>6}  cmp / slc / win fwd+bwd"
)


def format_row(row: Row) -> str:
    """One line of the table."""
    branches = " / ".join(f"{total:.2f}" for _, total in row.branches_ms.values())
    return (
        f"{row.shape:>5} {row.T:>6} {row.fwd_ms:>7.2f} {row.fwd_bwd_ms:>8.2f} "
        f"{row.dense_cudnn_fwd_ms:>8.2f} {row.dense_cudnn_fwd_bwd_ms:>9.2f} "
        f"{row.dense_flash_fwd_bwd_ms:>9.2f} {row.ratio_to_cudnn:>6.2f} {row.peak_gib:>5.2f} "
        f"{row.spread:>6.1%}  {branches}"
    )


def write_result(path: Path, command: str, commit: str, rows: list[Row]) -> None:
    """Write the machine, the command, the commit and the rows as JSON."""
    document = {
        **describe_machine(),
        "commit": commit,
        "command": command,
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
