import pytest
import torch

from nsa_core.recall.by_depth import DEPTHS, Recall, make_contexts, measure_recall
from tests.core.train.models import make_model


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_context_holds_the_answer_once_and_right_after_its_key(depth) -> None:
    tokens, answers = make_contexts(40, 21, depth, 6, seed=1)
    assert tokens.shape == (6, 21)
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        place = row.index(row[-1])
        assert row[place + 1] == answer
        assert row.count(answer) == 1
        assert place == 2 * round(depth * 9)


class Rememberer(torch.nn.Module):
    """Answers right: the token after the last occurrence of the key."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens_BT.shape, self.config.vocab_size)
        for row, tokens in enumerate(tokens_BT.tolist()):
            logits[row, -1, tokens[tokens.index(tokens[-1]) + 1]] = 1.0
        return logits


def measure(model, **changes) -> Recall:
    return measure_recall(model, "fp32", max_context=16, poll=lambda: None, **changes)


def test_a_model_that_remembers_scores_one() -> None:
    assert measure(Rememberer(make_model().config)).accuracy == (1.0,) * len(DEPTHS)


def test_a_run_whose_rows_hold_no_pair_is_asked_for_one() -> None:
    found = measure_recall(make_model(), "fp32", max_context=2, poll=lambda: None)
    assert (found.context, found.accuracy) == (3, (1.0,) * len(DEPTHS))


def test_an_untrained_model_scores_near_chance_and_the_same_each_time() -> None:
    model = make_model()
    found = measure(model, num_trials=64)
    assert found.context == 15
    assert sum(found.accuracy) / len(DEPTHS) < 3 * found.chance
    assert found == measure(model, num_trials=64)
    assert model.training
