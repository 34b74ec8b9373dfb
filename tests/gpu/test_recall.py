"""A small NSA model on a card recalls pairs from 4,112 and 16,400 tokens (spec: to be shown, 9).

Coverage cannot do it: 16 of 61 blocks, and of 253, hold a pair, and a query selects 5 besides those
that are always selected. Blocks chosen without looking for the key hold at most 5 of the 16 pairs.
"""

import pytest
import torch

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.recall.bench import TABLE, judge, teach_and_judge
from nsa_core.recall.learning import as_dense
from nsa_core.recall.recipes import CARD_NSA, CARD_TASK, LONG_CARD_TASK, on_card

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def learned():
    """Rows of the NSA model by length; the dense control is printed beside them."""
    device = torch.device("cuda")
    found = list(teach_and_judge(on_card(), device))
    dense = list(teach_and_judge(as_dense(on_card()), device))
    print(TABLE.header, *map(TABLE.line, [*found, *dense]), sep="\n")  # noqa: T201 - the result
    return {row.seq_len: row for row in found}


@pytest.mark.parametrize("task", [CARD_TASK, LONG_CARD_TASK], ids=["4k", "16k"])
def test_far_pairs_are_recalled_and_not_without_the_selected_branch(learned, task):
    geometry = BlockGeometry.from_config(CARD_NSA)
    assert task.seq_len >= 4096
    assert task.is_beyond(geometry, on_card().model.num_layers)
    assert task.has_to_choose(geometry)
    row = learned[task.seq_len]
    assert row.num_queries >= 1000
    assert judge([row]) is None
    assert row.without_choice <= 0.5
