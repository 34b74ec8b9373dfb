"""Fetching ahead changes neither the order nor the place of a run, and only waits are data wait."""

import threading
import time

import pytest
import torch

from nsa_core.data.batch import LoaderState, TokenBatch
from nsa_core.data.errors import DataError
from nsa_core.data.prefetch import Prefetcher, do_nothing
from nsa_core.rundir.layout import RunDir
from nsa_core.train.feed import StepFeed
from nsa_core.train.goodput import GoodputClock
from nsa_core.train.loop import train
from tests.core.train.sessions import new_run, opened, saved, write_texts

CPU = torch.device("cpu")
GONE = DataError("the disk is gone", "look at it")


def batch(number):
    """One that holds its number, and the place behind it."""
    row = torch.full((1, 2), number)
    place = LoaderState(epoch=0, global_sample=number + 1, manifest_sha256="0", seq_len=2, seed=0)
    return TokenBatch(row, row, torch.tensor([0, 2]), 2, 2, 2, place)


class Source:
    """Batches in order, of which as many are ready as a test says; notes each wait."""

    def __init__(self, num_ready=0, fails_at=None):
        self.state = batch(-1).state
        self.num_ready, self.fails_at = num_ready, fails_at
        self.num, self.waited = 0, []

    def next_batch(self, poll):
        poll()
        if self.num == self.fails_at:
            raise GONE
        self.waited.append(self.num)
        found = self._next()
        self.state = found.state
        return found

    def ready_batch(self):
        if self.num_ready == 0 or self.num == self.fails_at:
            return None
        self.num_ready -= 1
        return self._next()

    def _next(self):
        found = batch(self.num)
        self.num += 1
        return found


def numbers(batches):
    return [int(one.tokens_BT[0, 0]) for one in batches]


@pytest.mark.parametrize("num_ready", [0, 1, 2, 3, 5, 99])
def test_the_order_and_the_place_are_those_of_the_steps_handed_out(num_ready):
    source = Source(num_ready)
    feed = StepFeed(source, CPU, 3)
    for step in range(4):
        assert numbers(feed.take(do_nothing)) == [3 * step, 3 * step + 1, 3 * step + 2]
        assert source.state.global_sample == 3 * (step + 1)
        for _ in range(5):  # more often than a step has micro-batches
            feed.fetch_ahead()
            assert source.state.global_sample == 3 * (step + 1)
    assert source.num <= 15  # never more than one step ahead
    assert source.waited == [n for n in range(12) if n < 3 or n >= 3 + num_ready]


def test_what_fails_ahead_ends_the_step_that_needs_it_and_not_the_one_before():
    source = Source(num_ready=99, fails_at=4)
    feed = StepFeed(source, CPU, 2)
    feed.take(do_nothing)
    for _ in range(4):
        feed.fetch_ahead()
    feed.take(do_nothing)
    for _ in range(4):
        feed.fetch_ahead()
    with pytest.raises(DataError, match="the disk is gone"):
        feed.take(do_nothing)
    assert source.state.global_sample == 4


def test_a_stop_while_waiting_loses_no_batch():
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    source = Source(num_ready=1)
    feed = StepFeed(source, CPU, 2)
    feed.fetch_ahead()
    with pytest.raises(Stop):
        feed.take(stop)
    assert source.state.global_sample == 0
    assert numbers(feed.take(do_nothing)) == [0, 1]


def test_a_prefetcher_hands_out_what_is_ready_and_keeps_a_failure_for_the_wait():
    gate = threading.Semaphore(0)

    def build(number):
        gate.acquire()
        if number == 2:
            raise GONE
        return number

    items = Prefetcher(build, 2, timeout_s=20)
    assert items.take_ready() is None
    gate.release(3)
    assert items.next() == 0
    ready = []
    deadline_s = time.monotonic() + 20
    while not ready and time.monotonic() < deadline_s:
        ready += [item for item in [items.take_ready()] if item is not None]
    assert ready == [1]
    while items._failure is None and time.monotonic() < deadline_s:
        assert items.take_ready() is None
    with pytest.raises(DataError, match="the disk is gone"):
        items.next()
    gate.release(9)
    assert items.close()
    in_the_loop = Prefetcher(int, 0, timeout_s=20)
    assert in_the_loop.take_ready() is None  # depth 0 builds when it is asked, not ahead
    assert in_the_loop.next() == 0
    in_the_loop.close()


class Ready:
    """A loader whose batches are all ready, or none; a wait takes five seconds of its clock."""

    def __init__(self, loader, is_ready):
        self._loader, self._is_ready = loader, is_ready
        self.now_s = 0.0
        self.seen = []

    @property
    def state(self):
        return self._loader.state

    @state.setter
    def state(self, value):
        self._loader.state = value

    def next_batch(self, poll):
        self.now_s += 5.0
        found = self._loader.next_batch(poll)
        self.seen.append(found.tokens_BT)
        return found

    def ready_batch(self):
        if not self._is_ready:
            return None
        behind = self._loader.state
        found = self._loader.next_batch(do_nothing)
        self._loader.state = behind
        self.seen.append(found.tokens_BT)
        return found

    def __getattr__(self, name):
        return getattr(self._loader, name)


def trained(root, text, *, is_ready, steps=3):
    """What a run saw and waited for, and where its checkpoints stand."""
    run = new_run(root, text, schedule={"steps": steps, "warmup_steps": 0})
    with opened(run) as session:
        loader = Ready(session.loader, is_ready)
        session.loader = loader
        session.clock = GoodputClock(0.0, {}, wall=lambda: loader.now_s, ticks=lambda: loader.now_s)
        train(session)
        session.keeper.drain()
        wait_s = session.clock.read(attempt=1, step=steps).buckets["data_wait"]
        place = session.position.loader["global_sample"]
    return run, loader.seen, wait_s, place


def weights(run: RunDir, step):
    model, optimizer = saved(run, step)
    return {**model, **optimizer}


def test_a_run_that_fetches_ahead_is_the_run_that_waits_bit_for_bit(tmp_path):
    text = tmp_path / "text.jsonl"
    write_texts(text)
    waiting, seen, wait_s, place = trained(tmp_path / "a", text, is_ready=False)
    ahead, seen_ahead, wait_ahead_s, place_ahead = trained(tmp_path / "b", text, is_ready=True)
    assert len(seen) == 6
    assert all(map(torch.equal, seen, seen_ahead))
    assert place == place_ahead == 12
    assert (wait_s, wait_ahead_s) == (30.0, 10.0)  # the first step alone is waited for
    for step in (1, 2, 3):
        one, other = weights(waiting, step), weights(ahead, step)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert [path.name for path in sorted(ahead.checkpoints.glob("step_*"))] == [
        f"step_00000{n}" for n in (1, 2, 3)
    ]
