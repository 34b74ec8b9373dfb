"""Batches of one rank: training in a seeded order with exact resume, and validation."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa_core.config.training import DataConfig
from nsa_core.data.batch import BatchShape, LoaderState, TokenBatch, make_batch
from nsa_core.data.prefetch import Prefetcher, do_nothing
from nsa_core.data.reporting import DataError
from nsa_core.data.staging import StagedData

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
NUM_ROUNDS = 6
#: Waits that the fetch statistics look back on.
NUM_WAITS = 512
#: The choice of validation samples does not depend on a run's seed, so that runs can be compared.
VALIDATION_SEED = 0


def mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 … size-1 that needs no table: a Feistel network with cycle walking."""

    size: int
    seed: int
    epoch: int

    def __call__(self, place: int) -> int:
        """The number at a place."""
        if not 0 <= place < self.size:
            message = f"place {place} is outside the permutation of {self.size}"
            raise IndexError(message)
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        number = self._shuffle(place, half_bits)
        while number >= self.size:  # the network permutes a power of 4; walk until inside
            number = self._shuffle(number, half_bits)
        return number

    def _shuffle(self, number: int, half_bits: int) -> int:
        low_mask = (1 << half_bits) - 1
        left, right = number >> half_bits, number & low_mask
        key = mix((mix((self.seed + _GOLDEN) & _MASK_64) + self.epoch) & _MASK_64)
        for round_number in range(NUM_ROUNDS):
            scrambled = mix((key + _GOLDEN * (round_number + 1) ^ right) & _MASK_64)
            left, right = right, left ^ (scrambled & low_mask)
        return left << half_bits | right


class TokenRow(Protocol):
    """Tokens of a split as one row; `SplitTokens`, or a fake of it."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`; short at the end."""


@dataclass(frozen=True)
class FetchStatistics:
    """How long the loop waited for batches; percentiles over the last 512."""

    last_s: float
    p50_ms: float
    p95_ms: float
    num_batches: int


@dataclass(frozen=True)
class LoaderPlan:
    """Which samples a rank takes.

    A call of `next_batch` on all ranks together consumes `micro_batch * world_size` samples that
    follow each other in the global order; rank r takes the r-th part. So the samples of a step do
    not depend on how they are divided into ranks and micro-batches.

    Attributes:
        calls_per_step: Batches that the loop takes one after another, with no compute in between.
            So many are kept ready: while a step computes, the next one's batches are built.
        is_pinned: Put batches into page-locked memory, from which a card copies by itself.
    """

    seq_len: int
    micro_batch: int
    seed: int
    rank: int = 0
    world_size: int = 1
    calls_per_step: int = 1
    is_pinned: bool = False

    @property
    def samples_per_call(self) -> int:
        """Samples that one micro-batch on every rank consumes."""
        return self.micro_batch * self.world_size

    def places(self, global_sample: int, call: int) -> range:
        """Places in the global order that this rank takes in the `call`-th call from a position."""
        first = global_sample + call * self.samples_per_call + self.rank * self.micro_batch
        return range(first, first + self.micro_batch)


def count_samples(num_tokens: int, seq_len: int) -> int:
    """Samples of a row: each gives `seq_len` targets; the last one can be shorter.

    The first token of all is never a target, so n tokens have n-1 targets.
    """
    return max(0, -(-(num_tokens - 1) // seq_len))


def read_sample(row: TokenRow, number: int, seq_len: int) -> NDArray[np.int64]:
    """Tokens of a sample: `seq_len` inputs, and the target of the last one."""
    return row.read(number * seq_len, (number + 1) * seq_len + 1)


def batch_shape(staged: StagedData, seq_len: int, *, pack_documents: bool) -> BatchShape:
    """How rows of this data are made."""
    return BatchShape(
        seq_len=seq_len,
        pack_documents=pack_documents,
        end_id=staged.tokenizer.end_id,
        token_num_bytes=staged.tokenizer.token_num_bytes(),
    )


class Loader:
    """Hands out the training batches of one rank, prefetched in a thread.

    Raises:
        DataError: If the state belongs to other data, another length or another seed.
    """

    def __init__(
        self,
        staged: StagedData,
        config: DataConfig,
        plan: LoaderPlan,
        state: LoaderState | None = None,
        row: TokenRow | None = None,
    ) -> None:
        self._row = staged.train if row is None else row
        self._plan = plan
        self._manifest_sha256 = staged.manifest_sha256
        self._shape = batch_shape(staged, plan.seq_len, pack_documents=config.pack_documents)
        self.num_samples = count_samples(len(self._row), plan.seq_len)
        self._begin = 0 if state is None else self._check_state(state)
        self.state = self._state_after(0)
        self._waits_s: deque[float] = deque(maxlen=NUM_WAITS)
        self._num_batches = 0
        self._warmup_batches = config.warmup_batches
        depth = config.prefetch and max(config.prefetch, plan.calls_per_step)
        self._prefetcher = Prefetcher(self._build, depth, config.loader_timeout_s)

    def warm_up(self, poll: Callable[[], None] = do_nothing) -> None:
        """Build the first `warmup_batches` before the first step is timed; none is consumed."""
        self._prefetcher.warm_up(self._warmup_batches, poll)

    def next_batch(self, poll: Callable[[], None] = do_nothing) -> TokenBatch:
        """The next batch; `state` and the batch's own state then point behind it.

        `poll` is called about ten times a second while waiting, and may raise.
        """
        started_s = time.monotonic()
        batch = self._prefetcher.next(poll)
        self._waits_s.append(time.monotonic() - started_s)
        self._num_batches += 1
        if batch.state is not None:
            self.state = batch.state
        return batch

    def statistics(self) -> FetchStatistics:
        """Waits of the loop; zero before the first batch."""
        waits_s = list(self._waits_s) or [0.0]
        p50_s, p95_s = np.percentile(waits_s, [50, 95])
        return FetchStatistics(
            waits_s[-1], float(p50_s) * 1e3, float(p95_s) * 1e3, self._num_batches
        )

    def close(self) -> bool:
        """End the thread; False if it is blocked in a read and was left behind."""
        return self._prefetcher.close()

    def _build(self, call: int) -> TokenBatch:
        places = self._plan.places(self._begin, call)
        rows = [read_sample(self._row, self._number(p), self._plan.seq_len) for p in places]
        batch = make_batch(rows, self._shape, self._state_after(call + 1))
        return batch.pinned() if self._plan.is_pinned else batch

    def _number(self, place: int) -> int:
        epoch, within = divmod(place, self.num_samples)
        return Permutation(self.num_samples, self._plan.seed, epoch)(within)

    def _state_after(self, num_calls: int) -> LoaderState:
        global_sample = self._begin + num_calls * self._plan.samples_per_call
        return LoaderState(
            epoch=global_sample // self.num_samples,
            global_sample=global_sample,
            manifest_sha256=self._manifest_sha256,
            seq_len=self._plan.seq_len,
            seed=self._plan.seed,
        )

    def _check_state(self, state: LoaderState) -> int:
        here = (self._manifest_sha256, self._plan.seq_len, self._plan.seed)
        saved = (state.manifest_sha256, state.seq_len, state.seed)
        for name, new, old in zip(("staged data", "seq_len", "seed"), here, saved, strict=True):
            if new != old:
                message = f"the checkpoint's data position is for {name} {old}, and this is {new}"
                raise DataError(message, f"resume with the same {name}, or begin a new run")
        return state.global_sample


def validation_batches(
    staged: StagedData, plan: LoaderPlan, num_batches: int, *, pack_documents: bool
) -> Iterator[TokenBatch]:
    """Yield this rank's validation batches.

    All ranks together see `num_batches * micro_batch` samples, fewer where the split is smaller:
    the same ones for every world size, seed and call. Each rank yields the same number of batches;
    rows that are left over have no targets.
    """
    shape = batch_shape(staged, plan.seq_len, pack_documents=pack_documents)
    num_samples = count_samples(len(staged.validation), plan.seq_len)
    num_used = min(num_samples, num_batches * plan.micro_batch)
    order = Permutation(num_samples, VALIDATION_SEED, 0)
    for call in range(-(-num_used // plan.samples_per_call)):
        rows = [
            read_sample(staged.validation, order(place), plan.seq_len)
            if place < num_used
            else np.empty(0, dtype=np.int64)
            for place in plan.places(0, call)
        ]
        yield make_batch(rows, shape)
