"""Rows of the recall task ask only for what stands in them, and out of reach means out of reach."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.config.nsa import NSAConfig
from nsa_core.evaluate.recall_task import RecallTask, draw_recall, recall_accuracy
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.model.transformer import LanguageModel
from tests.core.model.cases import small_config

NSA = NSAConfig(compress_block=8, compress_stride=8, select_block=8, num_selected=6, window=4)


def draw(task, rows=4, seed=0):
    return draw_recall(task, rows, torch.Generator().manual_seed(seed))


@given(
    clusters=st.integers(1, 4),
    cluster=st.integers(1, 4),
    queries=st.integers(1, 4),
    spare=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_every_query_has_one_pair_before_it_and_its_value_is_the_target(
    clusters, cluster, queries, spare, seed
):
    queries = min(queries, clusters * cluster)
    length = 2 * queries + 2 * clusters * cluster + spare
    task = RecallTask(length, clusters, cluster, queries, margin=spare // 3, distance=spare // 3)
    drawn = draw(task, seed=seed)
    for tokens, targets in zip(drawn.tokens_BT.tolist(), drawn.targets_BT.tolist(), strict=True):
        asked = [place for place, target in enumerate(targets) if target >= 0]
        assert asked == list(range(task.first_query, length, 2))
        for place in asked:
            key = tokens[place]
            assert key < task.num_keys
            (pair,) = [p for p in range(task.first_query) if tokens[p] == key]
            assert tokens[pair + 1] == tokens[place + 1] == targets[place]
            assert task.num_keys <= targets[place] < task.num_keys + task.num_values
            assert task.margin <= pair < task.first_query - task.distance - 1
        fillers = [token for token in tokens if token >= task.num_keys + task.num_values]
        assert len(fillers) == length - 2 * task.num_pairs - 2 * queries


def test_rows_beyond_reach_have_no_pair_in_the_window_or_a_forced_block():
    task = RecallTask(128, 6, 4, 16).beyond(NSA)
    geometry = BlockGeometry.from_config(NSA)
    assert task.is_beyond(geometry)
    assert not RecallTask(128, 6, 4, 16).is_beyond(geometry)
    drawn = draw(task, rows=16)
    is_pair_BT = drawn.tokens_BT < task.num_keys + task.num_values
    pairs = torch.nonzero(is_pair_BT[:, : task.first_query])[:, 1].tolist()
    for query in range(task.first_query, task.seq_len, 2):
        forced = geometry.forced_blocks(query)
        assert all(pair // NSA.select_block not in forced for pair in pairs)
        assert all(query - pair >= NSA.window for pair in pairs)


@pytest.mark.parametrize(
    ("sizes", "says"), [((20, 3, 4, 4), "room for 1 of 3"), ((64, 1, 4, 5), "queries 5 <= pairs 4")]
)
def test_a_row_that_cannot_hold_its_pairs_is_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        RecallTask(*sizes)


class Looks(LanguageModel):
    """Finds the last place of the same token before and gives what followed it."""

    def hidden(self, tokens_BT, packing=None):
        answers = torch.zeros_like(tokens_BT)
        for row, ids in enumerate(tokens_BT.tolist()):
            for place, token in enumerate(ids):
                before = [p for p in range(place) if ids[p] == token]
                answers[row, place] = ids[before[-1] + 1] if before else 0
        return torch.nn.functional.one_hot(answers, self.config.vocab_size).float().flatten(0, 1)

    @property
    def head_weight(self):
        return torch.eye(self.config.vocab_size)


def test_accuracy_is_one_for_a_model_that_looks_and_chance_for_one_that_guesses():
    task = RecallTask(64, 3, 4, 8).beyond(NSA)
    config = small_config(vocab_size=task.vocab_size)
    assert recall_accuracy(Looks(config), task, rows=5, batch=2) == 1.0
    assert recall_accuracy(LanguageModel(config), task, rows=40) < 0.2
