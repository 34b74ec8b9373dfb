"""Room for the items of the inverted index, which test_interpreter.py builds."""

from itertools import combinations_with_replacement

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton.index import max_items


@pytest.mark.parametrize("item_queries", [1, 2, 3, 16])
@pytest.mark.parametrize("lists", [1, 2, 4])
def test_no_ids_make_more_items_than_there_is_room_for(lists: int, item_queries: int) -> None:
    for counts in combinations_with_replacement(range(8), lists):
        items = sum(-(-count // item_queries) for count in counts)
        assert items <= max_items(sum(counts), lists, item_queries), counts
        assert max_items(sum(counts), lists, item_queries) <= sum(counts) // item_queries + lists
