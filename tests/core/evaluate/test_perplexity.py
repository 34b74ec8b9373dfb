import math
from typing import Never

import pytest
import torch

from nsa_core.evaluate.perplexity import Perplexity, measure_perplexity
from tests.core.train.models import make_batches, make_model


def measure(model, batches, poll=lambda: None) -> Perplexity:
    return measure_perplexity(model, batches, "fp32", poll)


def test_bits_per_byte_count_all_bits_over_the_bytes_of_text() -> None:
    found = Perplexity(loss=math.log(2) * 3, num_tokens=100, num_bytes=150)
    assert found.bits_per_byte == pytest.approx(2.0)
    assert found.perplexity == pytest.approx(8.0)


def test_the_mean_is_over_tokens_and_not_over_batches() -> None:
    model = make_model()
    batches = make_batches(2) + make_batches(1, seed=5, rows=5)
    found = measure(model, batches)
    parts = [measure(model, [batch]) for batch in batches]
    expected = sum(p.loss * p.num_tokens for p in parts) / sum(p.num_tokens for p in parts)
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert found.num_tokens == sum(p.num_tokens for p in parts)


def test_the_same_batches_give_the_same_number_and_the_mode_comes_back() -> None:
    model = make_model()
    model.train()
    assert measure(model, make_batches(2)) == measure(model, make_batches(2))
    assert model.training
    assert not any(torch.is_tensor(p.grad) for p in model.parameters())


def test_a_stop_ends_it_and_the_mode_comes_back() -> None:
    model = make_model()

    def stop() -> Never:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, make_batches(1), stop)
    assert model.training


def test_no_target_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no target"):
        measure(make_model(), [])
