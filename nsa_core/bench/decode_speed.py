"""Time the attention of one decoded token over full caches: NSA beside SDPA, as CUDA graphs.

NSA is all three branches, the choice of blocks and the gated sum; dense is torch's SDPA over all
keys of the same heads. Neither includes projections, nor the writing of the new token's keys.
Legend: B sequences, T tokens of each, H heads, G groups, D width.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core.bench.cases import DENSE_BACKENDS, GEOMETRY, SHAPES, Shape
from nsa_core.bench.command import (
    Bench,
    Column,
    Table,
    add_count,
    add_repeatable,
    check_sizes,
)
from nsa_core.bench.kernels import DTYPES
from nsa_core.bench.measure import Timing, time_runs
from nsa_core.kernels.cuda_graph import capture
from nsa_core.kernels.decode_attention import CachedPairs, Pair
from nsa_core.kernels.triton.decode_host import TritonDecode
from nsa_core.rundir.bench_result import Machine

_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class DecodeRow:
    """One length and batch; times in ms, with nothing of the inputs in the cache of the card.

    Attributes:
        shape: Name of the shape.
        T: Tokens of each sequence.
        batch: Sequences.
        ratio_to_cudnn: NSA's time over that of cuDNN; below 1 NSA is faster.
        ratio_to_fastest: NSA's time over that of the faster dense backend.
        floor_mib: What NSA has to read: its compressed, chosen and window keys and values.
        floor_ms: The time to read that at the rate of a copy in this run.
        spread: (slowest - fastest of the runs) / median, the larger of NSA's and cuDNN's.
    """

    shape: str
    T: int
    batch: int
    nsa_ms: float
    dense_cudnn_ms: float
    dense_flash_ms: float
    ratio_to_cudnn: float
    ratio_to_fastest: float
    floor_mib: float
    floor_ms: float
    spread: float


@dataclass(frozen=True)
class DecodeRequest:
    """What to time."""

    shapes: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: torch.dtype
    runs: int

    def __post_init__(self) -> None:
        """Refuse what would time nothing (ValueError)."""
        check_sizes(1, {"--length": self.lengths, "--batch": self.batches, "--runs": (self.runs,)})


def floor_bytes(shape: Shape, length: int, batch: int, element_size: int) -> int:
    """Keys and values that the last token of each sequence reads, in bytes."""
    chosen = (GEOMETRY.num_chosen(length - 1) - 1) * GEOMETRY.select_block
    chosen += (length - 1) % GEOMETRY.select_block + 1
    keys = GEOMETRY.num_compressed(length) + chosen + min(GEOMETRY.window, length)
    return 2 * keys * batch * shape.num_groups * shape.width * element_size


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The same launches as one CUDA graph."""
    graph, _ = capture(call, torch.device("cuda"))
    return graph.replay


def nsa_call(
    shape: Shape, length: int, batch: int, dtype: torch.dtype, device: str = "cuda"
) -> Callable[[], object]:
    """Attention of the last token of full caches."""
    groups, width = shape.num_groups, shape.width

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    def pair(rows: int) -> Pair:
        return normal(batch, rows, groups, width), normal(batch, rows, groups, width)

    pairs = CachedPairs(pair(GEOMETRY.num_cached(length)), pair(length), pair(GEOMETRY.window))
    q_BHD = normal(batch, shape.num_heads, width)
    gate_BH3 = torch.rand(batch, shape.num_heads, 3, device=device)
    position_B = torch.full((batch,), length - 1, device=device)
    attention = TritonDecode()
    return lambda: attention.attend(q_BHD, pairs, gate_BH3, position_B, GEOMETRY)


def dense_call(
    backend: SDPBackend, shape: Shape, length: int, batch: int, dtype: torch.dtype
) -> Callable[[], object]:
    """SDPA of one query over all keys, each group's end to end: the layout that suits it best."""

    def normal(heads: int, rows: int) -> Tensor:
        return torch.randn(batch, heads, rows, shape.width, device="cuda", dtype=dtype)

    q, k, v = (
        normal(heads, rows)
        for heads, rows in (
            (shape.num_heads, 1), (shape.num_groups, length), (shape.num_groups, length),
        )
    )  # fmt: skip

    def call() -> object:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def measure_copy_bytes_per_ms() -> float:
    """Rate of a copy on the card, bytes read and written."""
    source = torch.empty(_COPY_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / time_runs(lambda: target.copy_(source)).median_ms


def measure_row(
    shape: Shape, length: int, batch: int, request: DecodeRequest, bytes_per_ms: float
) -> DecodeRow:
    """Time one length and batch: dense first, NSA after it."""

    def timed(call: Callable[[], object]) -> Timing:
        return time_runs(graphed(call), runs=request.runs, leaves_clean=True)

    with torch.no_grad():
        dense = {
            name: timed(dense_call(backend, shape, length, batch, request.dtype))
            for name, backend in DENSE_BACKENDS.items()
        }
        nsa = timed(nsa_call(shape, length, batch, request.dtype))
    floor = floor_bytes(shape, length, batch, request.dtype.itemsize)
    cudnn, flash = dense["cudnn"], dense["flash"]
    return DecodeRow(
        shape=shape.name,
        T=length,
        batch=batch,
        nsa_ms=nsa.median_ms,
        dense_cudnn_ms=cudnn.median_ms,
        dense_flash_ms=flash.median_ms,
        ratio_to_cudnn=nsa.median_ms / cudnn.median_ms,
        ratio_to_fastest=nsa.median_ms / min(cudnn.median_ms, flash.median_ms),
        floor_mib=floor / 2**20,
        floor_ms=floor / bytes_per_ms,
        spread=max(nsa.spread, cudnn.spread),
    )


def measure_rows(request: DecodeRequest) -> Iterator[DecodeRow]:
    """Time every shape at every length and batch."""
    bytes_per_ms = measure_copy_bytes_per_ms()
    for name in request.shapes:
        for length in request.lengths:
            for batch in request.batches:
                yield measure_row(SHAPES[name], length, batch, request, bytes_per_ms)
                torch.cuda.empty_cache()


def _in_us(field: str) -> Callable[[DecodeRow], float]:
    return lambda row: 1e3 * getattr(row, field)


TABLE = Table(
    (
        Column("shape", 5, "shape"),
        Column("T", 6, "T"),
        Column("B", 3, "batch"),
        Column("nsa us", 7, _in_us("nsa_ms"), ".1f"),
        Column("cudnn us", 8, _in_us("dense_cudnn_ms"), ".1f"),
        Column("flash us", 8, _in_us("dense_flash_ms"), ".1f"),
        Column("ratio", 6, "ratio_to_cudnn", ".2f"),
        Column("/best", 6, "ratio_to_fastest", ".2f"),
        Column("floor us", 8, _in_us("floor_ms"), ".1f"),
        Column("MiB", 6, "floor_mib", ".1f"),
        Column("spread", 7, "spread", ".1%"),
    )
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this bench."""
    add_repeatable(parser, "--shape", "default: A", choices=sorted(SHAPES))
    add_repeatable(parser, "--length", "tokens in the cache", type=int, metavar="T")
    add_repeatable(parser, "--batch", "number of sequences", type=int, metavar="B")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add_count(parser, "--runs", 3, "runs behind each median")


def measure(options: argparse.Namespace, machine: Machine) -> Iterator[DecodeRow]:
    """Time what the flags ask for.

    Raises:
        ValueError: If a size is below 1.
    """
    del machine
    return measure_rows(
        DecodeRequest(
            shapes=tuple(options.shape or ("A",)),
            lengths=tuple(options.length or (8192, 32768, 65536)),
            batches=tuple(options.batch or (1, 16)),
            dtype=DTYPES[options.dtype],
            runs=options.runs,
        )
    )


BENCH = Bench(
    summary="Time the attention of one decoded token beside dense SDPA, as CUDA graphs.",
    needs_card=True,
    add_flags=add_flags,
    measure=measure,
    header=TABLE.header,
    format_row=TABLE.line,
)
