"""The order is a bijection that a seed and an epoch decide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.data.order import Permutation


@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_number_comes_exactly_once(size, seed, epoch):
    order = Permutation(size, seed, epoch)
    assert sorted(order(place) for place in range(size)) == list(range(size))


@given(size=st.integers(2, 2**40), place=st.integers(0, 2**40))
def test_a_large_order_stays_inside(size, place):
    assert 0 <= Permutation(size, 1, 0)(place % size) < size


def test_seeds_and_epochs_give_other_orders():
    orders = {
        tuple(Permutation(100, seed, epoch)(place) for place in range(100))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_neighbours_are_scattered():
    size = 10_000
    order = Permutation(size, 7, 0)
    steps = [abs(order(place + 1) - order(place)) for place in range(size - 1)]
    assert abs(sum(steps) / len(steps) / size - 1 / 3) < 0.02  # mean distance of two random places


def test_a_place_outside_is_refused():
    with pytest.raises(IndexError, match="place 5 is outside"):
        Permutation(5, 0, 0)(5)


#: By seed and epoch, of 12 samples.
KNOWN = {
    (0, 0): [7, 8, 5, 10, 3, 9, 1, 6, 11, 2, 0, 4],
    (1337, 0): [2, 1, 5, 6, 9, 0, 3, 7, 8, 11, 4, 10],
    (1337, 1): [1, 4, 3, 9, 11, 7, 6, 10, 2, 0, 8, 5],
}


def test_the_order_is_the_one_that_checkpoints_were_made_with():
    """A cursor is one integer: another permutation would repeat and leave out samples."""
    found = [[Permutation(12, seed, epoch)(p) for p in range(12)] for seed, epoch in KNOWN]
    assert found == list(KNOWN.values())
