"""How fast the cards of a machine compute, copy, are fed, and sum one tensor together."""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from nsa_core.rundir.report import AllReduceSpeed, CardSpeed
from nsa_core.train.card import ask_nvidia_smi

#: Side of the matrix product: large enough to fill every card of a profile.
GEMM_SIZE = 8192
#: Work of the product: long enough for clocks, power and heat to show.
LOAD_S = 1.5
COPY_BYTES = 2**30
HOST_BYTES = 2**28
#: Share of the free memory that is taken at once; the rest is for the products after it.
ALLOCATED_SHARE = 0.9
#: Clocks, power and heat are read only once they have followed the load.
SETTLE_S = 0.8
#: nvidia-smi answers within two seconds on a healthy driver.
SMI_S = 20.0
_MIB, _GB = 2**20, 1e9
SIZE_MIB = 256
DEADLINE_S = 60.0
_COUNT, _WARM = 10, 3


def measure_card(index: int, dtype: torch.dtype) -> CardSpeed:
    """Use a card for about three seconds.

    Raises:
        RuntimeError: What CUDA says if the card cannot do it (torch.OutOfMemoryError is one).
    """
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        free, _ = torch.cuda.mem_get_info(device)
        allocated = allocate(int(ALLOCATED_SHARE * free), device)
        torch.cuda.empty_cache()
        gemm_tflops, is_repeatable, smi = measure_gemm(device, dtype)
        return CardSpeed(
            index=index,
            name=torch.cuda.get_device_name(device),
            free_mib=round(free / _MIB),
            allocated_mib=round(allocated / _MIB),
            dtype=str(dtype).removeprefix("torch."),
            gemm_tflops=gemm_tflops,
            is_repeatable=is_repeatable,
            copy_gb_s=measure_copy(device),
            host_to_device_gb_s=measure_host(device, to_device=True),
            device_to_host_gb_s=measure_host(device, to_device=False),
            smi_under_load=smi,
        )


def allocate(num_bytes: int, device: torch.device) -> int:
    """Take memory in one piece, write all of it and read its ends and middle again.

    Raises:
        RuntimeError: If a byte came back wrong, or the memory cannot be had.
    """
    block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    block.fill_(171)
    places = torch.tensor([0, num_bytes // 2, num_bytes - 1], device=device)
    if not bool((block[places] == 171).all()):
        message = f"{num_bytes} bytes were written on {device}, and other ones read"
        raise RuntimeError(message)
    return num_bytes


def measure_gemm(device: torch.device, dtype: torch.dtype) -> tuple[float, bool, str]:
    """Rate of a square product in TFLOP/s, whether it repeats bit for bit, nvidia-smi meanwhile."""
    shape = (GEMM_SIZE, GEMM_SIZE)
    left, right = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    is_repeatable = torch.equal(left @ right, left @ right)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_smi, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        seconds = _load(lambda: torch.mm(left, right, out=out), asked)
        smi = asked.result()
    return 2 * GEMM_SIZE**3 / seconds / 1e12, is_repeatable, smi


def _load(call: Callable[[], object], asked: Future[str]) -> float:
    """Keep a card busy until it was asked about, at least `LOAD_S`; median seconds of a call."""
    seconds = _timed(call, 3)
    count = max(1, int(0.1 / max(seconds, 1e-6)))
    found, end_s = [], time.monotonic() + LOAD_S
    while time.monotonic() < end_s or not asked.done():
        found.append(_timed(call, count))
    return statistics.median(found)


def measure_copy(device: torch.device) -> float:
    """Bandwidth of the card's own memory in GB/s, bytes read and written counted."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _median(lambda: target.copy_(source), 10) / _GB


def measure_host(device: torch.device, *, to_device: bool) -> float:
    """Bandwidth between pinned memory and the card in GB/s."""
    host = torch.zeros(HOST_BYTES, dtype=torch.uint8).pin_memory()
    card = torch.zeros(HOST_BYTES, dtype=torch.uint8, device=device)
    target, source = (card, host) if to_device else (host, card)
    return HOST_BYTES / _median(lambda: target.copy_(source, non_blocking=True), 3) / _GB


def _median(call: Callable[[], object], count: int) -> float:
    call()
    return statistics.median(_timed(call, count) for _ in range(5))


def _timed(call: Callable[[], object], count: int) -> float:
    """Seconds of one call, over several on the current card."""
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / count


def ask_smi(uuid: str) -> str:
    """Everything nvidia-smi says of a card once it is loaded; empty without it or in time."""
    time.sleep(SETTLE_S)
    return ask_nvidia_smi(("-q", "-x", "-i", uuid), SMI_S)


class AllReduceError(RuntimeError):
    """The cards did not sum the tensor, or not to the right value; the message says why."""


def measure_all_reduce(
    world_size: int, backend: str = "nccl", size_mib: int = SIZE_MIB
) -> AllReduceSpeed:
    """Sum a tensor over all cards, or over processes without a card with the backend `gloo`.

    Raises:
        AllReduceError: If a process failed, a sum was wrong, or it took longer than its deadline.
    """
    context = multiprocessing.get_context("spawn")
    answers: SimpleQueue[float] = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="nsa-all-reduce-") as folder:
        meeting = str(Path(folder) / "meeting")
        words = (world_size, backend, size_mib, meeting, answers)
        started = spawn(_rank, words, nprocs=world_size, join=False)  # type: ignore[no-untyped-call]
        end_s = time.monotonic() + DEADLINE_S
        try:
            while not started.join(timeout=max(0.1, end_s - time.monotonic())):
                if time.monotonic() >= end_s:
                    message = f"the sum over {world_size} cards took longer than {DEADLINE_S:g} s"
                    raise AllReduceError(message)
        except ProcessException as error:
            raise AllReduceError(str(error).strip().splitlines()[-1]) from error
        finally:
            for process in started.processes:
                process.kill()
        seconds = max(answers.get() for _ in range(world_size))
    moved = size_mib * _MIB * 2 * (world_size - 1) / world_size
    return AllReduceSpeed(
        num_gpus=world_size, size_mib=size_mib, bus_gb_s=round(moved / seconds / 1e9, 2)
    )


def _rank(
    rank: int,
    world_size: int,
    backend: str,
    size_mib: int,
    meeting: str,
    answers: "SimpleQueue[float]",
) -> None:
    """One process: sums ones, checks the sum, and answers with the seconds of one call."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    block = torch.ones(size_mib * _MIB // 4, device=device)
    dist.all_reduce(block)
    if not bool((block == world_size).all()):
        message = f"rank {rank} summed ones of {world_size} cards to something else"
        raise RuntimeError(message)
    answers.put(_seconds(block))
    dist.destroy_process_group()


def _seconds(block: torch.Tensor) -> float:
    for _ in range(_WARM):
        dist.all_reduce(block)
    _finish(block)
    began_s = time.monotonic()
    for _ in range(_COUNT):
        dist.all_reduce(block)
    _finish(block)
    return (time.monotonic() - began_s) / _COUNT


def _finish(block: torch.Tensor) -> None:
    if block.is_cuda:
        torch.cuda.synchronize(block.device)
    dist.barrier()
