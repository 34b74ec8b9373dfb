"""Block geometry against brute force over tokens."""

import itertools

import pytest

from nsa_core.config.model import NSAConfig
from nsa_core.kernels.geometry import BlockGeometry
from tests.oracle import num_reads

SMALL = [
    (l, d, sel)
    for d, l_strides, sel_strides in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5))
    for l, sel in [(d * l_strides, d * sel_strides)]
    if l <= sel
]


def shared_tokens(first: int, length: int, other_first: int, other_length: int) -> int:
    return len(
        set(range(first, first + length)) & set(range(other_first, other_first + other_length))
    )


@pytest.mark.parametrize(("l", "d", "sel"), SMALL)
def test_overlap_weights_count_the_strides_in_common(l, d, sel):
    geometry = BlockGeometry(l, d, sel, 3, 1)
    for j in range(5):
        first = geometry.first_overlap(j)
        found = {
            first + m: weight for m, weight in enumerate(geometry.overlap_weights) if first + m >= 0
        }
        truth = {i: shared_tokens(i * d, l, j * sel, sel) / d for i in range(5 * sel + l)}
        assert found == {i: count for i, count in truth.items() if count}


def test_the_paper_sizes_give_the_printed_weights():
    geometry = BlockGeometry.from_config(NSAConfig())
    assert geometry.overlap_weights == (1, 2, 2, 2, 1)
    assert geometry.first_overlap(3) == 11


@pytest.mark.parametrize(("l", "d", "sel"), SMALL)
def test_a_token_sees_the_blocks_that_end_at_or_before_it(l, d, sel):
    geometry = BlockGeometry(l, d, sel, 3, 1)
    for position in range(40):
        visible = [i for i in range(41) if i * d + l - 1 <= position]
        assert geometry.num_compressed(position + 1) == len(visible)


@pytest.mark.parametrize(("l", "d", "sel"), SMALL)
def test_a_cache_has_a_row_for_every_block_and_the_next_one(l, d, sel):
    geometry = BlockGeometry(l, d, sel, 3, 1)
    for num_tokens in range(1, 41):
        rows = geometry.num_cached(num_tokens)
        assert rows == -(-num_tokens // sel) * (sel // d)
        assert rows > max(geometry.next_compressed(t) for t in range(num_tokens))


@pytest.mark.parametrize("position", range(0, 70, 3))
def test_forced_blocks_are_unique_started_and_within_the_count(position):
    geometry = BlockGeometry(4, 2, 8, 3, 1)
    forced = geometry.forced_blocks(position)
    current = position // 8
    assert set(forced) == {0, current, max(current - 1, 0)}
    assert len(set(forced)) == len(forced) <= geometry.num_chosen(position)
    assert geometry.num_chosen(position) == min(3, current + 1)


def test_a_decode_step_at_65536_tokens_reads_5631_keys():
    assert num_reads(BlockGeometry.from_config(NSAConfig()), 65_535) == 5_631
