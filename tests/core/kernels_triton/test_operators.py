"""Every operator that torch.compile meets: schema, fake and gradient are what they say."""

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

INTERPRETED = "interpreted_operators"


@pytest.mark.slow
def test_torch_finds_nothing_wrong_with_an_operator(interpreted) -> None:
    wrong = {
        (operator, test): words
        for operator, tests in interpreted["checks"].items()
        for test, words in tests.items()
        if words
    }
    assert not wrong


@pytest.mark.slow
def test_no_operator_is_left_out(interpreted) -> None:
    assert interpreted["checks"]
    assert interpreted["left_out"] == []


@pytest.mark.slow
def test_a_deterministic_run_returns_no_word_that_nobody_wrote(interpreted) -> None:
    assert interpreted["unwritten_words"] == 0
