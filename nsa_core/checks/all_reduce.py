"""How fast all cards of a machine sum one tensor: one process a card, as a run would have."""

import multiprocessing
import tempfile
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from nsa_core.rundir.speed import AllReduceSpeed

SIZE_MIB = 256
DEADLINE_S = 60.0
_COUNT, _WARM = 10, 3
_MIB = 2**20


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
