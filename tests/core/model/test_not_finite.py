"""A later token that is not finite changes no bit of an earlier one, in training and in decode."""

import math

import pytest
import torch

from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import extend
from nsa_core.model.decode_step import DecodeLoop
from tests.core.model.cases import small_config, small_model, tokens

BACKENDS = {"reference": ReferenceBackend(), "sdpa": GatheredBackend()}
LENGTH, FIRST_BAD, BAD_ID = 50, 31, 30


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def models(request: pytest.FixtureRequest):
    """A sound model, and one whose last id has an embedding of NaN."""
    config = small_config(tie_embeddings=False)
    sound, bad = (small_model(config, backends=BranchBackends.of(request.param)) for _ in range(2))
    with torch.no_grad():
        bad.embedding.weight[BAD_ID] = math.nan
    return sound, bad


def row_with_bad_tail():
    row = tokens(1, LENGTH) % BAD_ID
    row[:, FIRST_BAD:] = BAD_ID
    return row


@torch.no_grad()
def test_one_pass_keeps_every_bit_before_it(models) -> None:
    outs = [model.hidden(row_with_bad_tail()) for model in models]
    assert torch.equal(outs[0][:FIRST_BAD], outs[1][:FIRST_BAD])
    assert outs[1][FIRST_BAD:].isnan().all()


@torch.no_grad()
def test_the_documents_beside_it_keep_every_bit(models) -> None:
    row = torch.cat([tokens(1, 9) % BAD_ID, row_with_bad_tail(), tokens(1, 33) % BAD_ID], dim=1)
    packing = Packing.from_lengths([9, LENGTH, 33])
    outs = [model.hidden(row, packing) for model in models]
    for kept in (slice(0, 9 + FIRST_BAD), slice(9 + LENGTH, None)):
        assert torch.equal(outs[0][kept], outs[1][kept])


def make_cache(model, fill):
    cache = DecodeCache.allocate(
        model.config, batch=1, capacity=LENGTH, chunk=40, dtype=torch.float64
    )
    for layer in cache.layers:
        for pair in vars(layer).values():
            pair.k.fill_(fill)
            pair.v.fill_(fill)
    return cache


@torch.no_grad()
def test_a_chunk_of_a_prompt_keeps_every_bit_before_it(models) -> None:
    pieces = row_with_bad_tail().split([25, 25], dim=1)
    outs = []
    for model in models:
        cache = make_cache(model, 0.0)
        outs.append(torch.cat([extend(model, cache, piece).hidden_BmW[0] for piece in pieces]))
    assert torch.equal(outs[0][:FIRST_BAD], outs[1][:FIRST_BAD])


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_steps_do_not_see_what_a_cache_held_before(attention: str) -> None:
    model, row = small_model(small_config(attention=attention)), tokens(1, LENGTH)
    hidden = []
    for fill in (0.0, math.nan):
        cache = make_cache(model, fill)
        extend(model, cache, row[:, :22])
        loop = DecodeLoop(model, cache)
        hidden.append(torch.cat([loop.step(token).hidden_BW.clone() for token in row[:, 22:].T]))
    assert torch.equal(*hidden)
