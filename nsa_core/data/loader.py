"""Loader: training batches of one rank in a seeded order, with exact resume for any world size."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nsa_core.config.training import DataConfig
from nsa_core.data.batch import BatchShape, LoaderState, TokenBatch, make_batch
from nsa_core.data.errors import DataError
from nsa_core.data.order import Permutation
from nsa_core.data.prefetch import Prefetcher, do_nothing
from nsa_core.data.staging import StagedData

#: Waits that the fetch statistics look back on.
NUM_WAITS = 512


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

    Args:
        staged: The data.
        config: Prefetch depth, warm-up, deadline, packing.
        plan: Which samples this rank takes.
        state: Where to go on; None begins.
        row: The tokens, if not `staged.train`.

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

        Args:
            poll: Called about ten times a second while waiting; it may raise.

        Raises:
            LoaderStalled: If no batch arrives before the deadline.
            DataError: If the data cannot be read.
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
