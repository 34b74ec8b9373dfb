"""Rows of the recall task ask only for what stands in them, and out of reach means out of reach."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.config.model import NSAConfig
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.transformer import LanguageModel
from nsa_core.recall.task import RecallBatch, RecallTask, draw_recall, recall_accuracy
from tests.core.model.cases import small_config

NSA = NSAConfig(compress_block=8, compress_stride=8, select_block=8, num_selected=4, window=4)
GEOMETRY = BlockGeometry.from_config(NSA)
TASK = RecallTask(block=8, num_blocks=12, num_filled=6, num_queries=4).beyond(NSA)


def draw(task, rows: int = 4, seed=0) -> RecallBatch:
    return draw_recall(task, rows, torch.Generator().manual_seed(seed))


@given(
    blocks=st.integers(1, 5),
    empty=st.integers(0, 3),
    pairs=st.integers(1, 3),
    repeats=st.integers(1, 2),
    spare=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_every_query_has_its_pair_before_it_and_the_value_is_the_target(
    blocks, empty, pairs, repeats, spare, seed
) -> None:
    task = RecallTask(
        block=12,
        num_blocks=blocks + empty,
        num_filled=blocks,
        num_queries=max(1, blocks * pairs - 1),
        pairs=pairs,
        repeats=repeats,
        margin=spare // 3,
        distance=spare // 2,
    )
    drawn = draw(task, seed=seed)
    for tokens, targets in zip(drawn.tokens_BT.tolist(), drawn.targets_BT.tolist(), strict=True):
        context, asked = tokens[: task.first_query], tokens[task.first_query :]
        assert [place for place, target in enumerate(targets) if target >= 0] == list(
            range(task.first_query, task.seq_len)
        )
        assert len(set(asked)) == len(asked) == task.num_queries
        for key, value in zip(asked, targets[task.first_query :], strict=True):
            assert key < task.num_keys <= value < task.num_keys + task.num_values
            places = [place for place, token in enumerate(context) if token == key]
            assert len(places) == repeats
            assert all(context[place + 1] == value for place in places)
            assert len({(place - task.margin) // task.block for place in places}) == 1
        in_block = Counter(
            (place - task.margin) // task.block
            for place, token in enumerate(context)
            if token < task.num_keys
        )
        assert sorted(in_block.values()) == [pairs * repeats] * blocks
        assert 0 <= min(in_block) <= max(in_block) < task.num_blocks


def test_rows_beyond_reach_have_no_pair_in_the_window_or_a_forced_block() -> None:
    is_pair_BT = draw(TASK, rows=32).tokens_BT < TASK.num_keys + TASK.num_values
    pairs = torch.nonzero(is_pair_BT[:, : TASK.first_query])[:, 1].tolist()
    assert min(pairs) == 8
    assert max(pairs) == TASK.first_query - TASK.distance - 1
    for query in range(TASK.first_query, TASK.seq_len):
        forced = GEOMETRY.forced_blocks(query)
        assert all(pair // NSA.select_block not in forced for pair in pairs)
        assert all(query - pair >= NSA.window for pair in pairs)


def reached(geometry, position, num_layers):
    """Places whose content windows and always selected blocks carry to a position."""
    places = {position}
    for _ in range(num_layers):
        windows = {p - back for p in places for back in range(geometry.window)}
        blocks = {block for p in places for block in geometry.forced_blocks(p)}
        block = geometry.select_block
        chosen = {b * block + k for b in blocks for k in range(block)}
        places |= {p for p in windows | chosen if 0 <= p <= position}
    return places


@given(
    window=st.integers(1, 30),
    num_layers=st.integers(1, 3),
    distance=st.integers(0, 60),
    margin=st.sampled_from([0, 7, 8, 11]),
)
def test_beyond_is_what_no_chain_of_windows_and_forced_blocks_reaches(
    window, num_layers, distance, margin
) -> None:
    geometry = replace(GEOMETRY, window=window)
    task = replace(TASK, margin=margin, distance=distance)
    pairs = range(margin, task.first_query - distance)
    queries = range(task.first_query, task.seq_len)
    seen = set().union(*(reached(geometry, query, num_layers) for query in queries))
    assert task.is_beyond(geometry, num_layers) == seen.isdisjoint(pairs)


def test_a_second_layer_doubles_what_a_window_reaches() -> None:
    wide = replace(GEOMETRY, window=21)
    near, far = (replace(TASK, distance=distance) for distance in (32, 40))
    assert [near.is_beyond(wide, layers) for layers in (1, 2)] == [True, False]
    assert far.is_beyond(wide, 2)


def test_a_query_has_to_choose_where_its_free_blocks_cover_at_most_a_third_of_the_filled_ones() -> (
    None
):
    assert TASK.has_to_choose(GEOMETRY)
    assert replace(TASK, num_filled=3, num_queries=1).has_to_choose(GEOMETRY)
    assert not replace(TASK, num_filled=2, num_queries=1).has_to_choose(GEOMETRY)
    assert not TASK.has_to_choose(replace(GEOMETRY, num_selected=6))
    assert not replace(TASK, margin=4).has_to_choose(GEOMETRY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_filled": 13}, "13 of 12 blocks"),
        ({"num_queries": 7}, "queries 7 <= pairs 6"),
        ({"num_keys": 5}, "pairs 6 <= keys 5"),
        ({"repeats": 5}, "a block of 8 tokens must be even and hold 1 x 5 pairs"),
        ({"block": 7}, "a block of 7 tokens must be even"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(TASK, **change)


class Looks(LanguageModel):
    """Finds the last place of the same token before and gives what followed it."""

    def hidden(self, tokens_BT: torch.Tensor, packing=None):
        answers = torch.zeros_like(tokens_BT)
        for row, ids in enumerate(tokens_BT.tolist()):
            for place, token in enumerate(ids):
                before = [p for p in range(place) if ids[p] == token]
                answers[row, place] = ids[before[-1] + 1] if before else 0
        return torch.nn.functional.one_hot(answers, self.config.vocab_size).float().flatten(0, 1)

    @property
    def head_weight(self):
        return torch.eye(self.config.vocab_size)


def test_accuracy_is_one_for_a_model_that_looks_and_chance_for_one_that_guesses() -> None:
    config = small_config(vocab_size=TASK.vocab_size)
    assert recall_accuracy(Looks(config), TASK, rows=5, batch=2) == 1.0
    assert recall_accuracy(LanguageModel(config), TASK, rows=80) < 0.2
