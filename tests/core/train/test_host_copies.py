"""A snapshot's copies: into memory that is pinned once, and whole before the loop goes on."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nsa_core.env import RankEnvironment
from nsa_core.rundir.events import read_events
from nsa_core.train import session
from nsa_core.train.group import RankGroup
from nsa_core.train.host_copies import HostCopies, plan_blocks
from nsa_core.train.telemetry import Telemetry
from tests.core.train.models import CPU, same


class Pinned:
    """Gives memory as a driver would, until it has no more."""

    def __init__(self, limit=10**9):
        self.given = []
        self.limit = limit

    def __call__(self, num_bytes):
        if sum(self.given) + num_bytes > self.limit:
            message = "CUDA error: out of memory\nCUDA kernel errors might be reported later"
            raise RuntimeError(message)
        self.given.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)


def groups(value):
    return {
        "model": {"w": torch.full((7, 5), value), "b": torch.full((3,), value)[::2]},
        "optimizer": {"w/step": torch.tensor(value), "none": torch.empty(0, 4)},
        "random": {"cpu": torch.arange(9, dtype=torch.uint8)},
    }


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_equal_what_was_copied_and_do_not_change_with_it(is_pinned):
    host = HostCopies(CPU, pytest.fail, Pinned(), is_pinned=is_pinned)
    state = groups(1.5)
    copies = host.copy(state)
    state["model"]["w"].add_(1)
    assert copies.keys() == state.keys()
    assert all(same(copies[name], groups(1.5)[name]) for name in state)
    assert all(one.is_contiguous() for group in copies.values() for one in group.values())


def test_memory_is_pinned_once_and_used_again():
    pinned = Pinned()
    host = HostCopies(CPU, pytest.fail, pinned, is_pinned=True)
    host.reserve([one for group in groups(0.0).values() for one in group.values()])
    reserved = list(pinned.given)
    first = host.copy(groups(1.0))["model"]["w"]
    second = host.copy(groups(2.0))["model"]["w"]
    assert pinned.given == reserved
    assert first.data_ptr() == second.data_ptr()
    assert host.reserved_bytes == sum(reserved)


def test_state_that_grows_after_the_first_step_gets_more_memory():
    pinned = Pinned()
    host = HostCopies(CPU, pytest.fail, pinned, is_pinned=True)
    host.copy({"model": {"w": torch.ones(2**24)}})
    more = {"model": {"w": torch.ones(2**24)}, "optimizer": {"m": torch.ones(2**26)}}
    copies = host.copy(more)
    assert torch.equal(copies["optimizer"]["m"], more["optimizer"]["m"])
    assert pinned.given == [2**28, 2**28]


def test_a_driver_that_pins_nothing_is_reported_once_and_copies_are_made_all_the_same():
    told = []
    host = HostCopies(CPU, told.append, Pinned(limit=0), is_pinned=True)
    for value in (1.0, 2.0):
        copies = host.copy(groups(value))
        assert all(same(copies[name], groups(value)[name]) for name in copies)
    assert len(told) == 1
    assert "cannot be pinned (CUDA error: out of memory)" in told[0]
    assert not host.is_pinned


def test_blocks_are_filled_without_overlap_and_no_larger_than_needed():
    sizes = [5 * 2**20 + 3, 100, 0, 3 * 2**20, 64, 9 * 2**20, 2**20 - 64]
    plan = plan_blocks(sizes, 2**20)
    assert set(plan.blocks) == {2**24}
    taken = sorted(
        (block, begin, begin + size)
        for (block, begin), size in zip(plan.places, sizes, strict=True)
        if size
    )
    for (block, begin, end), (next_block, next_begin, _) in pairwise(taken):
        assert begin % 64 == 0
        assert next_block > block or next_begin >= end
    assert max(end for *_, end in taken) <= 2**24
    assert len(plan.blocks) == 2


def test_memory_that_another_rank_cannot_pin_is_an_event(run, manifest, monkeypatch):
    """The first rank of a pod says what happens to all of them, and this happens to one alone."""
    place = RankEnvironment(rank=1, local_rank=1, world_size=2, local_size=2)
    context = SimpleNamespace(telemetry=Telemetry(run, manifest, place), group=RankGroup(place))
    learner = SimpleNamespace(
        shards=object(),
        weights=lambda: {"w": torch.zeros(3)},
        steps=SimpleNamespace(
            optimizers=SimpleNamespace(expected_moments=lambda: [torch.zeros(3)])
        ),
    )
    refusing = partial(HostCopies, allocate=Pinned(limit=0))
    monkeypatch.setattr(session, "HostCopies", refusing)
    session._make_host_copies(context, learner, torch.device("cuda"))
    (event,) = read_events(run)
    assert event.kind == "not_pinned"
    assert event.message.startswith("rank 1: ")
