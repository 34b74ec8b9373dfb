"""One rank on a card of a joined group: every collective once, and a step of DDP; see the test."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from nsa_core.env import read_rank
from nsa_core.train.joined_group import JoinedGroup


def main() -> None:
    """Fail with an assertion where a collective gives something else than it should."""
    place = read_rank()
    torch.cuda.set_device(place.local_rank)
    device = torch.device("cuda", place.local_rank)
    group = JoinedGroup(place, device, timeout_s=60.0)
    total = place.world_size * (place.world_size - 1) // 2
    assert group.add_up([place.rank, 1]) == [total, place.world_size]
    assert group.gather(b"x" * place.rank) == [b"x" * rank for rank in range(place.world_size)]
    assert group.from_first(b"first" if place.is_first else b"") == b"first"
    assert group.as_first(claim=place.is_first)
    numbers = torch.full((3,), float(place.rank), device=device)
    group.sum_in_place(numbers)
    assert numbers.tolist() == [float(total)] * 3
    group.copy_from_first(numbers.fill_(place.rank))
    assert numbers.tolist() == [0.0] * 3
    group.tighten(30.0)
    check_step(place.rank, place.world_size, device)
    group.has_agreed = True
    assert group.leave(0, lambda: True)
    sys.stdout.write("ok\n")


def check_step(rank: int, size: int, device: torch.device) -> None:
    """The gradient is the mean over the ranks."""
    layer = torch.nn.Linear(2, 1, bias=False, device=device)
    wrapped = DistributedDataParallel(
        layer, device_ids=[device.index], gradient_as_bucket_view=True
    )
    wrapped(torch.full((1, 2), float(rank + 1), device=device)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[(size + 1) / 2] * 2]


if __name__ == "__main__":
    main()
