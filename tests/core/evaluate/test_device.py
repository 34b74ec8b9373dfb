"""A batch on its way to the model: equal rows are told apart from packed documents."""

import numpy as np
import pytest
import torch

from nsa_core.data.batch import BatchShape, TokenBatch, make_batch
from nsa_core.evaluate.device import move

END = 9


def batch(rows, *, pack_documents) -> TokenBatch:
    shape = BatchShape(6, pack_documents, END, np.ones(10, dtype=np.int32))
    return make_batch([np.array(row) for row in rows], shape)


@pytest.mark.parametrize(
    ("rows", "pack_documents", "length"),
    [
        ([[1] * 7, [2] * 7], True, 6),
        ([[1, 2, END, 3, 4, 5, 6], [2] * 7], True, None),
        ([[1, 2, END, 3, 4, 5, 6], [2] * 7], False, 6),
        ([[1, 2], [2] * 7], True, None),
    ],
)
def test_rows_are_uniform_exactly_where_each_is_one_segment(
    rows, pack_documents: bool, length: int | None
) -> None:
    tokens, _, packing = move(batch(rows, pack_documents=pack_documents), torch.device("cpu"))
    assert packing.uniform_length == length
    assert packing.num_tokens == tokens.numel()
