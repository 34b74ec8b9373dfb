"""The whole model against the one of `layer_reference`: one pass, packed, chunks, single steps."""

from functools import cache

import pytest
import torch
from torch.nn import functional as F

from nsa_core.kernels.packing import Packing
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import extend
from nsa_core.model.decode_step import DecodeLoop
from tests.core.model import layer_reference
from tests.core.model.cases import free_tokens, small_config, small_model, tokens
from tests.core.model.layer_reference import hidden_states

#: Nothing here is a default, so that a setting which is not read is seen.
OTHERS = {"norm_eps": 0.3, "tie_embeddings": False, "rope": {"base": 50.0}, "num_layers": 3}
LINEAR = {"rope": {"base": 80.0, "scaling": "linear", "scale": 2.5}, "activation": "silu"}
CONFIGS = {
    "nsa": small_config(**OTHERS),
    "nsa, linear scaling": small_config(**LINEAR, gate={"kind": "softmax", "temperature": 0.4}),
    "dense": small_config(attention="dense", **OTHERS),
    "dense, linear scaling": small_config(attention="dense", **LINEAR),
}
LENGTH = 45
#: Angles are float32 in the model: 45 positions cost about 1e-6 a layer, hidden states are 1.
TOLERANCE = 2e-5


@cache
def expected(name):
    """Hidden states of one document, which no module of the package computes."""
    model = small_model(CONFIGS[name])
    return hidden_states(
        model.config, dict(model.named_parameters()), tokens(1, LENGTH)[0]
    ).detach()


def one_pass(model, row):
    return model.hidden(row)


def packed(model, row):
    """The document between two others."""
    around = torch.cat([tokens(1, 7, seed=8), row, tokens(1, 30, seed=9)], dim=1)
    found = model.hidden(around, Packing.from_lengths([7, row.shape[1], 30]))
    return found[7 : 7 + row.shape[1]]


def make_cache(model, chunk: int):
    return DecodeCache.allocate(
        model.config, batch=1, capacity=LENGTH, chunk=chunk, dtype=torch.float64
    )


def in_chunks(model, row) -> torch.Tensor:
    kept = make_cache(model, 13)
    steps = [extend(model, kept, piece) for piece in row.split(13, dim=1)]
    return torch.cat([step.hidden_BmW[0] for step in steps])


def in_steps(model, row) -> torch.Tensor:
    loop = DecodeLoop(model, make_cache(model, 1))
    return torch.cat([loop.step(token).hidden_BW.clone() for token in row.T])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", [one_pass, packed, in_chunks, in_steps], ids=lambda f: f.__name__)
def test_hidden_states_equal_the_token_by_token_model(name: str, way) -> None:
    assert free_tokens(CONFIGS[name], LENGTH) >= 25
    with torch.no_grad():
        found = way(small_model(CONFIGS[name]), tokens(1, LENGTH))
    torch.testing.assert_close(found, expected(name), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["dense", "dense, linear scaling"])
def test_every_gradient_of_the_dense_control_equals_that_of_the_token_by_token_model(
    name: str,
) -> None:
    model, row = small_model(CONFIGS[name]), tokens(1, 21)
    target = row.roll(-1, dims=1)
    weights = dict(model.named_parameters())
    head = weights["embedding.weight"] if model.config.tie_embeddings else weights["head.weight"]
    logits = hidden_states(model.config, weights, row[0]) @ head.T
    losses = (model.loss(row, target).sum, F.cross_entropy(logits, target[0], reduction="sum"))
    grads = [torch.autograd.grad(loss, list(weights.values())) for loss in losses]
    for weight, grad, truth in zip(weights, *grads, strict=True):
        assert truth.abs().max() > 0, weight
        torch.testing.assert_close(grad, truth, rtol=1e-5, atol=2e-5, msg=lambda m, n=weight: n + m)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_rotary_positions_is_far_from_this_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = expected(name)
    monkeypatch.setattr(layer_reference, "rope", lambda x, position, settings: x)
    model = small_model(CONFIGS[name])
    plain = hidden_states(model.config, dict(model.named_parameters()), tokens(1, LENGTH)[0])
    assert (plain - truth)[1:].abs().amax(dim=-1).min() > 1e3 * TOLERANCE
