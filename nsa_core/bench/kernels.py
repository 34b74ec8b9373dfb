"""Time whole NSA and its branches beside dense attention, in one run, on the card that is here."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nsa_core.bench.cases import (
    DENSE_BACKENDS,
    NSA_SIZES,
    SHAPES,
    Case,
    Shape,
    dense_case,
    nsa_cases,
)
from nsa_core.bench.command import Bench, check_at_least
from nsa_core.bench.floor import Floor, attention_floor
from nsa_core.bench.measure import forward_backward, peak_gib, time_runs
from nsa_core.config.model import ModelConfig
from nsa_core.rundir.bench_result import Machine

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Row:
    """One shape at one length; times in ms, forward alone and forward with backward.

    Attributes:
        shape: Name of the shape.
        T: Tokens of a document.
        tokens: Tokens of a call.
        ratio_to_cudnn: Forward and backward of NSA over that of cuDNN; below 1 NSA is faster.
        peak_gib: Memory that forward and backward take at their peak, in GiB.
        spread: (slowest - fastest of the runs) / median, the larger of NSA's and cuDNN's.
        floor_fwd_ms: NSA's arithmetic at the rate of a matrix product in this run; likewise the
            next, with backward.
        branches_ms: Forward, and forward with backward, of each branch alone.
    """

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
    floor_fwd_ms: float
    floor_fwd_bwd_ms: float
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

    def __post_init__(self) -> None:
        """Refuse what would time something else.

        Raises:
            ValueError: If a call holds no whole number of documents, or nothing would be run.
        """
        check_at_least(
            1, {"--length": self.lengths, "--tokens": (self.tokens,), "--runs": (self.runs,)}
        )
        for length in self.lengths:
            if self.tokens % length:
                message = (
                    f"--length {length}: a call of {self.tokens} tokens is no whole number of such "
                    "documents; change one of `--length` and `--tokens`"
                )
                raise ValueError(message)


def run_case(case: Case, runs: int) -> CaseResult:
    """Time a case and take its peak memory."""
    both = forward_backward(case.forward, case.inputs, case.grad)
    both()
    peak = peak_gib(both)
    with torch.no_grad():
        forward = time_runs(case.forward, runs=runs)
    total = time_runs(both, runs=runs)
    return CaseResult(forward.median_ms, total.median_ms, peak, max(forward.spread, total.spread))


def floor_of(shape: Shape, length: int, tokens: int, tflops: float) -> Floor:
    """The floor of whole NSA at a shape."""
    model = ModelConfig(
        num_heads=shape.num_heads,
        num_kv_groups=shape.num_groups,
        head_dim_k=shape.width,
        head_dim_v=shape.width,
        nsa=NSA_SIZES,
    )
    return attention_floor(model, length, tokens, tflops)


def measure_row(shape: Shape, length: int, request: Request, tflops: float) -> Row:
    """Time one shape at one length: dense first, NSA after it.

    Args:
        shape: Heads and widths.
        length: Tokens of a document.
        request: What else.
        tflops: Rate of a matrix product, for the floor.
    """
    dense = {
        name: run_case(dense_case(name, shape, length, request.tokens, request.dtype), request.runs)
        for name in DENSE_BACKENDS
    }
    nsa = {
        case.name: run_case(case, request.runs)
        for case in nsa_cases(shape, length, request.tokens, request.dtype)
    }
    whole, cudnn, flash = nsa["nsa"], dense["cudnn"], dense["flash"]
    floor = floor_of(shape, length, request.tokens, tflops)
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
        floor_fwd_ms=floor.fwd_ms,
        floor_fwd_bwd_ms=floor.fwd_bwd_ms,
        branches_ms={
            name: (result.fwd_ms, result.fwd_bwd_ms)
            for name, result in nsa.items()
            if name != "nsa"
        },
    )


def measure_rows(request: Request, tflops: float) -> Iterator[Row]:
    """Time every shape at every length; the floor is taken at `tflops`."""
    for name in request.shapes:
        for length in request.lengths:
            yield measure_row(SHAPES[name], length, request, tflops)
            torch.cuda.empty_cache()


HEADER = (
    f"{'shape':>5} {'T':>6} {'fwd':>7} {'fwd+bwd':>8} {'cudnn f':>8} {'cudnn fb':>9} "
    f"{'flash fb':>9} {'ratio':>6} {'floor fb':>8} {'GiB':>5} {'spread':>6}  "
    "cmp / slc / win fwd+bwd"
)


def format_row(row: Row) -> str:
    """One line of the table."""
    branches = " / ".join(f"{total:.2f}" for _, total in row.branches_ms.values())
    return (
        f"{row.shape:>5} {row.T:>6} {row.fwd_ms:>7.2f} {row.fwd_bwd_ms:>8.2f} "
        f"{row.dense_cudnn_fwd_ms:>8.2f} {row.dense_cudnn_fwd_bwd_ms:>9.2f} "
        f"{row.dense_flash_fwd_bwd_ms:>9.2f} {row.ratio_to_cudnn:>6.2f} "
        f"{row.floor_fwd_bwd_ms:>8.2f} {row.peak_gib:>5.2f} {row.spread:>6.1%}  {branches}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    add = parser.add_argument
    add("--shape", action="append", choices=sorted(SHAPES), help="may be repeated; all if left out")
    add("--length", action="append", type=int, metavar="T", help="tokens of a document; repeatable")
    add("--tokens", type=int, default=65536, metavar="N", help="tokens of a call")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add("--runs", type=int, default=3, metavar="N", help="runs behind each median")


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[Row]:
    """Time what the flags ask for.

    Raises:
        ValueError: If they cannot go together.
    """
    request = Request(
        shapes=tuple(options.shape or sorted(SHAPES)),
        lengths=tuple(options.length or (2048, 8192, 32768, 65536)),
        tokens=options.tokens,
        dtype=DTYPES[options.dtype],
        runs=options.runs,
    )
    if machine.matmul_tflops is None:
        message = "the floor needs the rate of a matrix product, and it was not measured"
        raise ValueError(message)
    return measure_rows(request, machine.matmul_tflops)


BENCH = Bench(
    summary="Time whole NSA and each of its branches beside dense SDPA: cuDNN and flash of torch.",
    needs_card=True,
    add_flags=add_flags,
    measure=measure,
    header=HEADER,
    format_row=format_row,
)
