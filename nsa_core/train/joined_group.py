"""Several ranks under torchrun, joined by torch.distributed.

What is small goes through gloo on the hosts, so that no card is waited for; nothing is pickled.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from nsa_core.config.run import RunConfig
from nsa_core.env import RankEnvironment
from nsa_core.train.failure import RankLostError, TrainerConfigurationError
from nsa_core.train.group import RankGroup
from nsa_core.train.learner import choose_device

_POLL_S = 0.2
#: What the libraries below torch say where another rank is gone; torch has no type for it.
_LOST = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe", "socket")


class JoinedGroup(RankGroup):
    """Several ranks under torchrun.

    A collective that fails because another rank is gone is a `RankLostError`.
    """

    def __init__(self, place: RankEnvironment, device: torch.device, timeout_s: float) -> None:
        """Wait for all ranks.

        Raises:
            RankLostError: If they do not meet in time.
        """
        super().__init__(place)
        self._device = device
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _linked():
            found = next(iter(rendezvous("env://", timeout=timeout)))
            self._store = PrefixStore("ends", found[0])
            dist.init_process_group(
                backend,
                store=PrefixStore("group", found[0]),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )

    def add_up(self, numbers: Sequence[int]) -> list[int]:
        """As in `RankGroup`."""
        total = torch.tensor(list(numbers), dtype=torch.int64)
        with _linked():
            dist.all_reduce(total)
        return [int(number) for number in total.tolist()]

    def gather(self, content: bytes) -> list[bytes]:
        """As in `RankGroup`."""
        sizes = self._all(torch.tensor([len(content)], dtype=torch.int64))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = _to_tensor(content)
        parts = self._all(padded)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def _all(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with _linked():
            dist.all_gather(parts, own)
        return parts

    def from_first(self, content: bytes) -> bytes:
        """As in `RankGroup`."""
        size = torch.tensor([len(content)], dtype=torch.int64)
        with _linked():
            dist.broadcast(size, 0)
            found = _to_tensor(content) if self.is_first else _empty(int(size))
            dist.broadcast(found, 0)
        return found.numpy().tobytes()

    def sum_in_place(self, tensor: Tensor) -> None:
        """As in `RankGroup`."""
        with _linked():
            dist.all_reduce(tensor)

    def copy_from_first(self, tensor: Tensor) -> None:
        """As in `RankGroup`."""
        with _linked():
            dist.broadcast(tensor, 0)

    def tighten(self, timeout_s: float) -> None:
        """As in `RankGroup`."""
        limit = timedelta(seconds=timeout_s)
        distributed_c10d._set_pg_timeout(limit, distributed_c10d._get_default_group())

    def leave(self, code: int, wait: Callable[[], bool]) -> bool:
        """As in `RankGroup`."""
        own = str(code)
        try:
            self._store.set(str(self.place.rank), own)
            if any(self._read(rank, wait) != own for rank in range(self.size)):
                return False
        except RuntimeError:  # the store went with the process that holds it
            return False
        self._let_others_read(wait)
        with suppress(RuntimeError):  # all have agreed, and the links end with the process
            dist.destroy_process_group()
        return True

    def _let_others_read(self, wait: Callable[[], bool]) -> None:
        """Stay until all ranks have read how the others end.

        The store lives in the torchrun of pod 0, which goes when its own ranks are gone.
        """
        try:
            self._store.add("left", 1)
            while self._store.add("left", 0) < self.size and wait():
                time.sleep(_POLL_S)
        except RuntimeError:  # the ranks of pod 0 have gone, because all had read it
            return

    def _read(self, rank: int, wait: Callable[[], bool]) -> str:
        """How a rank ends; empty where it is not worth waiting any longer."""
        while not self._store.check([str(rank)]):
            if not wait():
                return ""
            time.sleep(_POLL_S)
        return self._store.get(str(rank)).decode()


def join_group(config: RunConfig, place: RankEnvironment) -> RankGroup:
    """The ranks of a run; one alone has nothing to wait for.

    Raises:
        TrainerConfigurationError: If there are not as many as the configuration says, or this rank
            has no device.
        RankLostError: If they do not meet in time.
    """
    if place.world_size != config.num_ranks:
        message = (
            f"{place.world_size} processes were started, and the run has {config.num_ranks} ranks"
        )
        raise TrainerConfigurationError(
            message, hint="Start it with `nsa-ops launch`, which starts as many as are needed"
        )
    if place.world_size == 1:
        return RankGroup(place)
    return JoinedGroup(place, choose_device(config, place), config.watchdog.compile_limit_s)


def _to_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _empty(0)


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@contextmanager
def _linked() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(error) from error


def lost_rank(error: BaseException) -> RankLostError:
    """The error of a rank whose collective failed."""
    first_line = str(error).strip().partition("\n")[0].partition(". This is")[0]
    return RankLostError(
        f"a collective failed: {first_line[:300]}",
        hint="Look at the other ranks: one of them is gone, or hangs",
    )


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of torch means that another rank is gone, or a link to it."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _LOST)
