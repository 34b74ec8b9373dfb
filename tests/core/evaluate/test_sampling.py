"""Generation continues a prompt as whole forward passes would, and shows no half character."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_core.data.tokenizer import ByteTokenizer
from nsa_core.evaluate.sampling import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Sampling,
    pick_token,
    pieces,
    stream,
)
from tests.core.model.cases import free_tokens, small_config, small_model, tokens

BYTES = ByteTokenizer()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("chunk", [2, 512])
def test_greedy_tokens_are_the_ones_of_whole_forward_passes(attention: str, chunk: int) -> None:
    model = small_model(small_config(attention=attention))
    prompt = tokens(1, 30)[0].tolist()
    row = list(prompt)
    assert free_tokens(model.config, 42) - free_tokens(model.config, 30) == 12
    for _ in range(12):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    assert list(stream(model, prompt, max_new_tokens=12, prefill_chunk=chunk)) == row[30:]


def test_a_stop_token_ends_the_text_and_is_left_out() -> None:
    model = small_model()
    text = list(stream(model, [1, 2], max_new_tokens=10))
    stop = text[4]
    assert (
        list(stream(model, [1, 2], max_new_tokens=10, stop_token=stop)) == text[: text.index(stop)]
    )


def test_the_same_seed_draws_the_same_text() -> None:
    model = small_model()
    texts = [
        list(stream(model, [1, 2], max_new_tokens=8, sampling=Sampling(1.5, 0.95, seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_top_p_draws_only_from_the_smallest_set_that_is_likely_enough() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {pick_token(logits, Sampling(1.0, 0.7), generator).item() for _ in range(200)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("prompt", [[], [31], [-1]])
def test_a_prompt_without_ids_or_outside_the_vocabulary_is_refused(prompt) -> None:
    with pytest.raises(ValueError, match=r"0 \.\. 30"):
        list(stream(small_model(), prompt, max_new_tokens=1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1.0, math.nan, math.inf, 1e-40, 9.9e-7, 1.1e6)),
        *(("top_p", value) for value in (0.0, 1.5, math.nan)),
        *(("seed", value) for value in (-1, 2**64)),
    ],
)
def test_sampling_values_without_meaning_are_refused(name, value) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {re.escape(str(value))}$"):
        Sampling(**{name: value})


def drawn_shares(logits_V: torch.Tensor, sampling: Sampling, *, draws: int = 6000) -> float:
    """Share of the draws that each id had."""
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = torch.cat([pick_token(logits_V, sampling, generator) for _ in range(draws)])
    return torch.bincount(ids, minlength=len(logits_V)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_as_often_as_the_softmax_of_logits_over_temperature_says(
    temperature: float,
) -> None:
    logits = torch.tensor([1.0, -0.5, 2.0, 0.0])
    found = drawn_shares(logits, Sampling(temperature, seed=5))
    # Four standard deviations of a share are at most 4 * sqrt(1/4 / 6000) = 0.026.
    torch.testing.assert_close(found, torch.softmax(logits / temperature, 0), atol=0.026, rtol=0)


@pytest.mark.parametrize(
    ("temperature", "wanted"),
    [(MIN_TEMPERATURE, [0.0, 1.0, 0.0]), (MAX_TEMPERATURE, [1 / 3, 1 / 3, 1 / 3])],
)
def test_the_least_temperature_is_greedy_and_the_greatest_is_even(
    temperature, wanted: list[float]
) -> None:
    found = drawn_shares(torch.tensor([-80.0, 90.0, 89.0]), Sampling(temperature))
    torch.testing.assert_close(found, torch.tensor(wanted), atol=0.026, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, MAX_TEMPERATURE])
def test_ids_beyond_num_ids_are_never_drawn(temperature) -> None:
    model = small_model()
    sampling = Sampling(temperature)
    kept = {"prompt": [1, 2], "max_new_tokens": 120, "sampling": sampling}
    assert max(stream(model, **kept)) >= 5
    drawn = set(stream(model, **kept, num_ids=5))
    assert drawn <= set(range(5))
    assert temperature == 0 or drawn == set(range(5))


def test_tokens_are_drawn_where_the_logits_are() -> None:
    """No value is read back: tensors without data are enough."""
    with FakeTensorMode():
        logits = torch.zeros(31)
        generator = torch.Generator()
        for sampling in (Sampling(), Sampling(0.7, 0.9)):
            assert pick_token(logits, sampling, generator).shape == (1,)


@given(st.text())
def test_text_comes_out_character_by_character(text) -> None:
    ids = BYTES.encode(text.encode("utf-8", "replace").decode()).tolist()
    found = list(pieces(BYTES, ids))
    assert "".join(found) == BYTES.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


def test_a_piece_is_given_as_soon_as_its_character_is_whole() -> None:
    seen, given_out = [], []

    def ids():
        for token in "aé€😀".encode():
            seen.append(token)
            yield token

    for piece in pieces(BYTES, ids()):
        given_out.append((piece, len(seen)))
    assert given_out == [("a", 1), ("é", 3), ("€", 6), ("😀", 10)]


def test_bytes_that_are_no_text_are_shown_and_hold_nothing_up() -> None:
    found = list(pieces(BYTES, [0xFF] * 9 + list(b"on")))
    assert "".join(found).endswith("on")
    assert len(found) >= 3
