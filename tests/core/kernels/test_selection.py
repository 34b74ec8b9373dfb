"""Which blocks are chosen: ties, forced blocks, uniqueness, counts."""

import pytest
import torch

from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.kernels.selection import choose_blocks, select_scores
from tests.core.kernels.cases import GEOMETRIES, Inputs, make_inputs, run

BACKENDS = {"reference": ReferenceBackend(), "sdpa": GatheredBackend()}
SIZES = BlockGeometry(4, 2, 4, 4, 8)


def chosen(scores: list[float], position: int) -> list[int]:
    score_GJ = torch.tensor([scores], dtype=torch.float64)
    ids = choose_blocks(score_GJ, torch.tensor(position), SIZES)
    return ids[0].tolist()


def test_the_lowest_index_wins_an_exact_tie():
    assert chosen([0.0] * 8, position=31) == [0, 1, 6, 7]
    assert chosen([0, 0, 0, 5, 5, 5, 0, 0], position=31) == [0, 3, 6, 7]


def test_a_tie_is_not_broken_by_a_difference_that_is_not_there():
    tiny = 1e-30
    assert chosen([0, 0, tiny, 0, 0, 0, 0, 0], position=31) == [0, 2, 6, 7]


def test_blocks_that_have_not_started_are_never_chosen():
    assert chosen([0, 0, 0, 9, 9, 9, 9, 9], position=11) == [0, 1, 2, -1]


def test_a_block_that_has_not_started_takes_the_place_of_none_that_has():
    assert chosen([0, 0.1, 0, 0, 9, 9, 9, 9], position=15) == [0, 1, 2, 3]


def test_fewer_blocks_than_the_count_are_padded_at_the_end():
    assert chosen([1.0], position=2) == [0, -1, -1, -1]


def test_scores_weigh_compressed_blocks_by_their_overlap():
    paper = BlockGeometry(32, 16, 64, 16, 512)
    prob_C = torch.arange(1.0, 12.0)
    expected = [2 * 1 + 2 * 2 + 2 * 3 + 4, 4 + 2 * 5 + 2 * 6 + 2 * 7 + 8]
    expected.append(8 + 2 * 9 + 2 * 10 + 2 * 11)
    assert select_scores(prob_C, 3, paper).tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_choices_hold_the_forced_blocks_once_each_and_have_the_right_count(backend, geometry):
    lengths = [3, 29, 94]
    packing = Packing.from_lengths(lengths)
    ids = run(backend, make_inputs(packing, geometry), geometry, packing).ids
    for row, position in enumerate(packing.position_N.tolist()):
        for group_ids in ids[row].tolist():
            blocks = [block for block in group_ids if block >= 0]
            assert group_ids == blocks + [-1] * (geometry.num_selected - len(blocks))
            assert blocks == sorted(set(blocks))
            assert len(blocks) == geometry.num_chosen(position)
            assert set(geometry.forced_blocks(position)) <= set(blocks)
            assert blocks[-1] == position // geometry.select_block


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_equal_scores_of_real_queries_go_to_the_lowest_index(backend):
    packing = Packing.from_lengths([64])
    inputs = make_inputs(packing, SIZES, dtype=torch.float32)
    with torch.no_grad():
        inputs.q.zero_()
    ids = run(backend, inputs, SIZES, packing).ids
    # Block 0 has no compressed block before it, so 1, 2, ... tie exactly and 1 wins.
    assert ids[63, 0].tolist() == [0, 1, 14, 15]


def test_the_choice_carries_no_gradient():
    packing = Packing.from_lengths([40])
    inputs = make_inputs(packing, SIZES)
    assert not run(GatheredBackend(), inputs, SIZES, packing).ids.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [[300], [40, 500]], ids=str)
def test_half_precision_is_scored_in_float32(dtype, lengths):
    """The same inputs in float64 give the same ids; scores in half give others for 3 to 21 rows."""
    geometry, packing = BlockGeometry(8, 4, 16, 6, 13), Packing.from_lengths(lengths)
    drawn = make_inputs(packing, geometry, dtype=torch.float32)
    half = Inputs(*(tensor.detach().to(dtype) for tensor in drawn.all()))
    wide = Inputs(*(tensor.double() for tensor in half.all()))
    exact = run(BACKENDS["reference"], wide, geometry, packing).ids
    assert torch.equal(run(BACKENDS["sdpa"], half, geometry, packing).ids, exact)
