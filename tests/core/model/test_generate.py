"""Generation continues a prompt as repeated whole forward passes would."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_core.evaluate.generate import Sampling, generate, pick_token
from tests.core.model.cases import small_config, small_model


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("chunk", [2, 512])
def test_greedy_tokens_are_the_ones_of_whole_forward_passes(attention, chunk):
    model = small_model(small_config(attention=attention))
    prompt, row = [3, 1, 4, 1, 5], [3, 1, 4, 1, 5]
    for _ in range(12):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    assert generate(model, prompt, max_new_tokens=12, prefill_chunk=chunk) == row[5:]


def test_a_stop_token_ends_the_text_and_is_left_out():
    model = small_model()
    text = generate(model, [1, 2], max_new_tokens=10)
    stop = text[4]
    assert generate(model, [1, 2], max_new_tokens=10, stop_token=stop) == text[: text.index(stop)]


def test_the_same_seed_draws_the_same_text():
    model = small_model()
    texts = [
        generate(model, [1, 2], max_new_tokens=8, sampling=Sampling(1.5, 0.95, seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_top_p_draws_only_from_the_smallest_set_that_is_likely_enough():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {pick_token(logits, Sampling(1.0, 0.7), generator).item() for _ in range(200)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("prompt", [[], [31], [-1]])
def test_a_prompt_without_ids_or_outside_the_vocabulary_is_refused(prompt):
    with pytest.raises(ValueError, match=r"0 \.\. 30"):
        generate(small_model(), prompt, max_new_tokens=1)


@pytest.mark.parametrize(("temperature", "top_p"), [(-1.0, 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_sampling_values_without_meaning_are_refused(temperature, top_p):
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature, top_p)


def test_tokens_are_drawn_where_the_logits_are():
    """No value is read back: tensors without data are enough."""
    with FakeTensorMode():
        logits = torch.zeros(31)
        generator = torch.Generator()
        for sampling in (Sampling(), Sampling(0.7, 0.9)):
            assert pick_token(logits, sampling, generator).shape == (1,)
