"""The figures of gates and choice against values computed by hand."""

import pytest
import torch

from nsa_core.model.statistics import measure

#: Two tokens of three heads: equal, two of three, one alone; shut, a half, three quarters.
GATES_NH3 = torch.tensor(
    [
        [[0.3, 0.3, 0.3], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]],
        [[0.0, 0.0, 0.0], [0.2, 0.2, 0.4], [0.9, 0.3, 0.0]],
    ]
)
#: Token 13 stands in block 3: the first, the one before and its own are forced, block 1 is free.
IDS_NGS = torch.tensor([[[0, -1, -1, -1]], [[0, 1, 2, 3]]])
POSITION_N = torch.tensor([0, 13])


def test_every_figure_is_the_one_computed_by_hand() -> None:
    found = measure(GATES_NH3, IDS_NGS, POSITION_N, select_block=4).tolist()
    assert found == pytest.approx(
        [
            # ln 3, ln 2, 0; 0, 1.5 ln 2, 2 ln 2 - 0.75 ln 3
            (1.0986123 + 0.6931472 + 0 + 0 + 1.0397208 + 0.5623351) / 6,
            0.0,
            (1 / 3 + 1 / 2 + 1 + 0 + 1 / 2 + 3 / 4) / 6,
            1 / 6,  # gates that are shut use no branch, and so not one only
            (1 / 3 + 1 / 2 + 1 + 0 + 1 / 4 + 3 / 4) / 6,
            (1 / 3 + 1 / 2 + 0 + 0 + 1 / 4 + 1 / 4) / 6,
            (1 / 3 + 0 + 0 + 0 + 1 / 2 + 0) / 6,
            5 / 2,
            1 / 5,
        ],
        abs=1e-6,
    )


def test_the_lowest_entropy_is_that_of_one_head_of_one_token() -> None:
    found = measure(GATES_NH3[:1, :2], IDS_NGS[:1], POSITION_N[:1], select_block=4)
    assert found[:2].tolist() == pytest.approx([(1.0986123 + 0.6931472) / 2, 0.6931472], abs=1e-6)
