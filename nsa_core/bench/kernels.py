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
from nsa_core.bench.command import (
    Bench,
    Column,
    Table,
    add_count,
    add_repeatable,
    check_sizes,
)
from nsa_core.bench.measure import forward_backward, peak_gib, time_runs
from nsa_core.config.counts import mean_visible_keys
from nsa_core.config.model import ModelConfig
from nsa_core.rundir.bench_result import Machine

#: Products of a backward pass over those of the forward: five to two.
BACKWARD = 2.5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KernelRow:
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
class KernelRequest:
    """What to time: names of shapes, lengths in tokens, tokens of a call."""

    shapes: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens: int
    dtype: torch.dtype
    runs: int

    def __post_init__(self) -> None:
        """Refuse what would time something else (ValueError)."""
        check_sizes(
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


@dataclass(frozen=True)
class Floor:
    """Milliseconds that the arithmetic alone takes; nothing is scored backward."""

    fwd_ms: float
    fwd_bwd_ms: float


def attention_floor(model: ModelConfig, length: int, tokens: int, tflops: float) -> Floor:
    """The floor of one layer of NSA over `tokens` tokens in documents of `length`.

    Args:
        model: Heads, widths and block sizes.
        length: Tokens of a document.
        tokens: Tokens of the call.
        tflops: Rate of a matrix product, in TFLOP/s.
    """
    keys = mean_visible_keys(model, length)
    per_key = 2.0 * tokens * model.num_heads
    branches = per_key * (model.head_dim_k + model.head_dim_v)
    branches *= keys.compressed + keys.selected + keys.sliding
    scoring = per_key * model.head_dim_k * keys.compressed
    per_ms = tflops * 1e9
    forward = (branches + scoring) / per_ms
    return Floor(forward, forward + BACKWARD * branches / per_ms)


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


def measure_row(shape: Shape, length: int, request: KernelRequest, tflops: float) -> KernelRow:
    """Time one shape at one length, dense first; `tflops` is the rate of a matrix product."""
    torch.compiler.reset()  # or one row's graph would serve, and slow, the next
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
    return KernelRow(
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


def measure_rows(request: KernelRequest, tflops: float) -> Iterator[KernelRow]:
    """Time every shape at every length; the floor is taken at `tflops`."""
    for name in request.shapes:
        for length in request.lengths:
            yield measure_row(SHAPES[name], length, request, tflops)
            torch.cuda.empty_cache()


def _branches(row: KernelRow) -> str:
    return " / ".join(f"{total:.2f}" for _, total in row.branches_ms.values())


TABLE = Table(
    (
        Column("shape", 5, "shape"),
        Column("T", 6, "T"),
        Column("fwd", 7, "fwd_ms", ".2f"),
        Column("fwd+bwd", 8, "fwd_bwd_ms", ".2f"),
        Column("cudnn f", 8, "dense_cudnn_fwd_ms", ".2f"),
        Column("cudnn fb", 9, "dense_cudnn_fwd_bwd_ms", ".2f"),
        Column("flash fb", 9, "dense_flash_fwd_bwd_ms", ".2f"),
        Column("ratio", 6, "ratio_to_cudnn", ".2f"),
        Column("floor fb", 8, "floor_fwd_bwd_ms", ".2f"),
        Column("GiB", 5, "peak_gib", ".2f"),
        Column("spread", 7, "spread", ".1%"),
        Column("cmp / slc / win fwd+bwd", 0, _branches),
    )
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    add_repeatable(parser, "--shape", "default: all", choices=sorted(SHAPES))
    add_repeatable(parser, "--length", "tokens of a document", type=int, metavar="T")
    add_count(parser, "--tokens", 65536, "tokens of a call")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add_count(parser, "--runs", 3, "runs behind each median")


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[KernelRow]:
    """Time what the flags ask for.

    Raises:
        ValueError: If they cannot go together.
    """
    request = KernelRequest(
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
    header=TABLE.header,
    format_row=TABLE.line,
)
