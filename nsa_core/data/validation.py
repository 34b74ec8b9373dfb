"""Validation batches: the same held-out samples every time, on any number of ranks."""

from collections.abc import Iterator

import numpy as np

from nsa_core.data.batch import TokenBatch, make_batch
from nsa_core.data.loader import LoaderPlan, batch_shape, count_samples, read_sample
from nsa_core.data.order import Permutation
from nsa_core.data.staging import StagedData

#: The choice of validation samples does not depend on a run's seed, so that runs can be compared.
VALIDATION_SEED = 0


def validation_batches(
    staged: StagedData, plan: LoaderPlan, num_batches: int, *, pack_documents: bool
) -> Iterator[TokenBatch]:
    """Yield this rank's validation batches.

    All ranks together see `num_batches * micro_batch` samples, fewer where the split is smaller:
    the same ones for every world size, seed and call. Each rank yields the same number of batches;
    rows that are left over have no targets.

    Args:
        staged: The data.
        plan: Row length, rows of a batch, rank and world size.
        num_batches: Micro-batches of a single rank's evaluation.
        pack_documents: Cut attention at document borders.
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
