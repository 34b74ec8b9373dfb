"""Batches come in one global order, resume exactly, and a dead loader is an error."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Never

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_core.config.training import DataConfig
from nsa_core.data.batch import IGNORED
from nsa_core.data.loader import Loader, LoaderPlan, Permutation, count_samples, validation_batches
from nsa_core.data.prefetch import LoaderStalled, Prefetcher
from nsa_core.data.reporting import DataError
from nsa_core.data.staging import StagedData, stage
from tests.core.data.conftest import local

SEQ_LEN = 64


@pytest.fixture
def config(corpus: Path) -> DataConfig:
    return local(corpus)


@pytest.fixture
def staged(config: DataConfig, tmp_path: Path) -> StagedData:
    return stage(config, tmp_path, 0)


def plan(micro_batch=2, rank=0, world_size=1, seq_len=SEQ_LEN, seed: int = 5) -> LoaderPlan:
    return LoaderPlan(seq_len, micro_batch, seed, rank, world_size)


def take(loader, count):
    try:
        return [loader.next_batch() for _ in range(count)]
    finally:
        assert loader.close()


def rows(batches):
    return [tuple(row) for batch in batches for row in batch.tokens_BT.tolist()]


def test_one_epoch_predicts_every_token_but_the_first_of_each_document(
    staged: StagedData, config: DataConfig
) -> None:
    loader = Loader(staged, config, plan(micro_batch=1))
    batches = take(loader, loader.num_samples)
    tokens, documents, _ = staged.manifest.total("train")
    assert sum(batch.num_targets for batch in batches) == tokens - documents
    assert batches[-1].state.epoch == 1


def test_the_second_pass_of_a_loader_has_another_order_of_the_same_samples(
    staged: StagedData, config: DataConfig
) -> None:
    loader = Loader(staged, config, plan(micro_batch=1))
    found = rows(take(loader, 2 * loader.num_samples))
    first, second = found[: loader.num_samples], found[loader.num_samples :]
    assert sorted(first) == sorted(second)
    assert first != second


def test_targets_are_the_next_tokens_and_stop_at_document_borders(
    staged: StagedData, config: DataConfig
) -> None:
    (batch,) = take(Loader(staged, config, plan(micro_batch=8)), 1)
    end = staged.tokenizer.end_id
    tokens, targets = batch.tokens_BT, batch.targets_BT
    counted = targets[:, :-1] != IGNORED
    assert torch.equal(targets[:, :-1][counted], tokens[:, 1:][counted])
    assert (targets[tokens == end] == IGNORED).all()
    assert (targets == end).any()


def test_segments_end_at_document_and_row_borders(staged: StagedData, config: DataConfig) -> None:
    (batch,) = take(Loader(staged, config, plan(micro_batch=8)), 1)
    flat = batch.tokens_BT.flatten()
    after_end = (flat == staged.tokenizer.end_id).nonzero().flatten() + 1
    expected = {0, *range(0, 8 * SEQ_LEN + 1, SEQ_LEN), *after_end.tolist()}
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == sorted(expected)
    assert batch.max_seqlen == batch.cu_seqlens.diff().max()


def test_unpacked_rows_are_one_segment_each(staged: StagedData, corpus: Path) -> None:
    config = local(corpus, pack_documents=False)
    (batch,) = take(Loader(staged, config, plan(micro_batch=8)), 1)
    assert (batch.tokens_BT[:, :-1] == staged.tokenizer.end_id).any()
    assert batch.cu_seqlens.tolist() == [*range(0, 8 * SEQ_LEN + 1, SEQ_LEN)]
    assert batch.max_seqlen == SEQ_LEN


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(consumed=st.integers(0, 90), prefetch=st.integers(0, 5))
def test_resume_continues_with_the_next_batch(
    staged: StagedData, config: DataConfig, consumed, prefetch
) -> None:
    config = config.model_copy(update={"prefetch": prefetch})
    whole = take(Loader(staged, config, plan()), consumed + 3)
    first = Loader(staged, config, plan())
    take(first, consumed)
    resumed = Loader(staged, config, plan(), first.state.model_validate(first.state.model_dump()))
    assert rows(take(resumed, 3)) == rows(whole[consumed:])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_global_order_does_not_depend_on_the_world_size(
    staged: StagedData, config: DataConfig, world_size: int
) -> None:
    expected = rows(take(Loader(staged, config, plan(micro_batch=4)), 60))
    micro_batch = 4 // world_size
    ranks = [
        take(Loader(staged, config, plan(micro_batch, rank, world_size)), 60)
        for rank in range(world_size)
    ]
    assert [row for step in zip(*ranks, strict=True) for row in rows(step)] == expected


def test_a_resume_with_another_world_size_keeps_the_order(
    staged: StagedData, config: DataConfig
) -> None:
    expected = rows(take(Loader(staged, config, plan(micro_batch=4)), 10))
    first = Loader(staged, config, plan(micro_batch=4))
    take(first, 5)
    ranks = [take(Loader(staged, config, plan(2, rank, 2), first.state), 5) for rank in range(2)]
    assert [row for step in zip(*ranks, strict=True) for row in rows(step)] == expected[20:]


def test_the_state_counts_consumed_batches_and_not_prefetched_ones(
    staged: StagedData, config: DataConfig
) -> None:
    loader = Loader(staged, config, plan())
    loader.warm_up()
    assert loader.state.global_sample == 0
    loader.next_batch()
    assert loader.state.global_sample == 2
    loader.close()


@pytest.mark.parametrize(("change", "word"), [({"seq_len": 32}, "seq_len"), ({"seed": 6}, "seed")])
def test_a_state_of_another_order_is_refused(
    staged: StagedData, config: DataConfig, change: dict[str, int], word: str
) -> None:
    loader = Loader(staged, config, plan())
    loader.close()
    with pytest.raises(DataError, match=word):
        Loader(staged, config, plan(**change), loader.state)


def test_a_state_of_other_data_is_refused(staged: StagedData, config: DataConfig) -> None:
    loader = Loader(staged, config, plan())
    loader.close()
    other = loader.state.model_copy(update={"manifest_sha256": "0" * 64})
    with pytest.raises(DataError, match="staged data"):
        Loader(staged, config, plan(), other)


class StuckRow:
    """A row whose reads never end, as on a dead network disk."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __len__(self) -> int:
        return 1000

    def read(self, start, stop):
        self.release.wait()
        return np.zeros(stop - start, dtype=np.int64)


def test_a_stalled_read_is_loader_stalled_after_the_deadline(
    staged: StagedData, corpus: Path
) -> None:
    stuck = StuckRow()
    loader = Loader(staged, local(corpus, loader_timeout_s=0.05), plan(), row=stuck)
    with pytest.raises(LoaderStalled, match=r"nothing was read for 0.05 s"):
        loader.next_batch()
    stuck.release.set()
    assert loader.close()


def test_a_wait_polls_and_an_exception_of_the_poll_loses_no_batch(
    staged: StagedData, config: DataConfig
) -> None:
    stuck = StuckRow()
    loader = Loader(staged, config, plan(), row=stuck)

    def stop() -> Never:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        loader.next_batch(stop)
    stuck.release.set()
    assert loader.next_batch().state.global_sample == 2
    assert loader.close()


class CountedRow:
    """A row that counts what was read of it."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.has_read = threading.Condition()

    def __len__(self) -> int:
        return 10_000

    def read(self, start, stop):
        with self.has_read:
            self.num_reads += 1
            self.has_read.notify()
        return np.zeros(stop - start, dtype=np.int64)


@pytest.mark.parametrize(("prefetch", "ready"), [(2, 6), (8, 8), (0, 0)])
def test_the_batches_of_a_whole_step_are_built_before_they_are_needed(
    staged: StagedData, corpus: Path, prefetch: int, ready: int
) -> None:
    """A step takes six; while it computes, the six of the next one are built."""
    row = CountedRow()
    six = replace(plan(micro_batch=1), calls_per_step=6)
    loader = Loader(staged, local(corpus, prefetch=prefetch), six, row=row)
    with row.has_read:
        assert row.has_read.wait_for(lambda: row.num_reads >= ready, 20)
    for _ in range(6):
        loader.next_batch()
    with row.has_read:
        assert row.has_read.wait_for(lambda: row.num_reads == 6 + ready, 20)
    assert loader.state.global_sample == 6
    assert loader.close()
    assert row.num_reads == 6 + ready


class BrokenRow(StuckRow):
    def read(self, start, stop) -> Never:
        raise OSError(5, "Input/output error")


def test_a_read_error_becomes_a_data_error(staged: StagedData, config: DataConfig) -> None:
    loader = Loader(staged, config, plan(), row=BrokenRow())
    with pytest.raises(DataError, match="Input/output error"):
        loader.next_batch()
    assert loader.close()


class FatalRow(StuckRow):
    def read(self, start, stop) -> Never:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_named(staged: StagedData, config: DataConfig) -> None:
    loader = Loader(staged, config, plan(), row=FatalRow())
    with pytest.raises(LoaderStalled, match="thread has died"):
        loader.next_batch()
    assert loader.close()


def test_warm_up_builds_batches_that_are_still_handed_out(staged: StagedData, corpus: Path) -> None:
    expected = rows(take(Loader(staged, local(corpus), plan()), 6))
    loader = Loader(staged, local(corpus, warmup_batches=5, prefetch=1), plan())
    loader.warm_up()
    assert rows(take(loader, 6)) == expected
    assert loader.statistics().num_batches == 6
    assert loader.statistics().p95_ms >= loader.statistics().p50_ms >= 0


def test_closing_leaves_no_thread_behind(staged: StagedData, config: DataConfig) -> None:
    before = threading.active_count()
    for _ in range(5):
        take(Loader(staged, config, plan()), 1)
    assert threading.active_count() == before


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (2, 1), (65, 1), (66, 2)])
def test_the_last_short_sample_counts(num_tokens: int, expected: int) -> None:
    assert count_samples(num_tokens, 64) == expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_is_the_same_every_time_and_on_any_number_of_ranks(
    staged: StagedData, world_size: int
) -> None:
    reference = list(validation_batches(staged, plan(4), 3, pack_documents=True))
    again = list(validation_batches(staged, plan(4, seed=99), 3, pack_documents=True))
    assert rows(again) == rows(reference)
    ranks = [
        list(validation_batches(staged, plan(4, rank, world_size), 3, pack_documents=True))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    found = [batch for batches in ranks for batch in batches]
    assert sum(b.num_targets for b in found) == sum(b.num_targets for b in reference)
    assert sum(b.num_text_bytes for b in found) == sum(b.num_text_bytes for b in reference)


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_takes_no_more_samples_than_asked(staged: StagedData, world_size: int) -> None:
    rows_each = 2 // world_size
    ranks = [
        list(validation_batches(staged, plan(rows_each, rank, world_size), 3, pack_documents=True))
        for rank in range(world_size)
    ]
    used = sum((b.targets_BT != IGNORED).any(dim=1).sum().item() for r in ranks for b in r)
    assert used == 3 * rows_each


def test_validation_bytes_are_the_bytes_of_the_counted_targets(staged: StagedData) -> None:
    batches = list(validation_batches(staged, plan(4), 10**6, pack_documents=True))
    tokens, documents, num_bytes = staged.manifest.total("validation")
    assert sum(batch.num_targets for batch in batches) == tokens - documents
    assert sum(batch.num_text_bytes for batch in batches) == num_bytes - documents  # first bytes


@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_number_comes_exactly_once(size, seed, epoch) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order(place) for place in range(size)) == list(range(size))


@given(size=st.integers(2, 2**40), place=st.integers(0, 2**40))
def test_a_large_order_stays_inside(size, place) -> None:
    assert 0 <= Permutation(size, 1, 0)(place % size) < size


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(Permutation(100, seed, epoch)(place) for place in range(100))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_neighbours_are_scattered() -> None:
    size = 10_000
    order = Permutation(size, 7, 0)
    steps = [abs(order(place + 1) - order(place)) for place in range(size - 1)]
    assert abs(sum(steps) / len(steps) / size - 1 / 3) < 0.02  # mean distance of two random places


def test_a_place_outside_is_refused() -> None:
    with pytest.raises(IndexError, match="place 5 is outside"):
        Permutation(5, 0, 0)(5)


#: By seed and epoch, of 12 samples.
KNOWN = {
    (0, 0): [7, 8, 5, 10, 3, 9, 1, 6, 11, 2, 0, 4],
    (1337, 0): [2, 1, 5, 6, 9, 0, 3, 7, 8, 11, 4, 10],
    (1337, 1): [1, 4, 3, 9, 11, 7, 6, 10, 2, 0, 8, 5],
}


def test_the_order_is_the_one_that_checkpoints_were_made_with() -> None:
    """A cursor is one integer: another permutation would repeat and leave out samples."""
    found = [[Permutation(12, seed, epoch)(p) for p in range(12)] for seed, epoch in KNOWN]
    assert found == list(KNOWN.values())


NO_HOST_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: error code 12")
NOT_PINNED = torch.AcceleratorError("CUDA error: out of memory\nSearch for ...")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), NO_HOST_MEMORY, NOT_PINNED, TypeError("a bug")],
    ids=["Python", "torch", "pinned", "bug"],
)
def test_an_error_of_the_thread_that_is_no_fault_of_the_data_comes_out_as_it_is(error) -> None:
    """The edge of the trainer judges it, as if the loop had raised it."""

    def build(number: int) -> Never:
        raise error

    made = Prefetcher(build, 1, 10.0)
    with pytest.raises(type(error)) as caught:
        made.next()
    assert caught.value is error
    assert made.close()


def test_a_data_error_of_the_thread_keeps_its_words_and_its_hint() -> None:
    error = DataError("staged shard 3 was cut", "delete it and stage again")

    def build(number: int) -> Never:
        raise error

    made = Prefetcher(build, 1, 10.0)
    with pytest.raises(DataError) as caught:
        made.next()
    assert caught.value is error
    assert made.close()
