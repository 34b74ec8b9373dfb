"""A key or value that is not finite reaches the tokens that see it, and no bit of any other."""

import math

import pytest
import torch

from nsa_core.kernels import gathered, gathered_backend, tiles
from nsa_core.kernels.decode_attention import CachedPairs, GatheredDecode
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from tests.core.kernels.cases import Inputs, make_inputs, run

SIZES = BlockGeometry(4, 2, 4, 4, 6)
#: (tile, chunk elements, masked-length factor), as in `test_branches`.
TILINGS = {"whole": (256, 2**19, 8), "small": (16, 1, 8), "gathered": (16, 2**12, 0)}
#: Token 28 of the second document: the last compressed block before it is the last sound one.
LENGTHS, FIRST_BAD = [13, 48], 41
PACKING = Packing.from_lengths(LENGTHS)


@pytest.fixture(params=[None, *TILINGS], ids=["reference", *TILINGS])
def backend(request, monkeypatch):
    if request.param is None:
        return ReferenceBackend()
    tile, elements, factor = TILINGS[request.param]
    monkeypatch.setattr(tiles, "LONG_TILE", tile)
    monkeypatch.setitem(gathered.CHUNK_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(gathered_backend, "MASKED_LENGTH_FACTOR", factor)
    return GatheredBackend()


def slots_from(row):
    """Slots of the compressed blocks that end at or after a row, and of no block."""
    slots = torch.arange(SIZES.num_slots(PACKING.num_tokens))
    first = LENGTHS[0] // 2
    last_row = LENGTHS[0] + (slots - first) * 2 + 3
    return torch.where(slots < first, row < LENGTHS[0], last_row >= row)


def broken(inputs, kind, value, rows, slots):
    """The same inputs, with the keys or the values of these rows and slots not finite."""
    changed = Inputs(*(tensor.detach().clone() for tensor in inputs.all()))
    for name, where in (("cmp", slots), ("slc", rows), ("win", rows)):
        getattr(changed, f"{kind}_{name}")[where] = value
    return changed


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_later_keys_and_values_change_no_bit_of_an_earlier_token(backend, kind, value):
    inputs = make_inputs(PACKING, SIZES, dtype=torch.float32)
    rows = torch.arange(PACKING.num_tokens) >= FIRST_BAD
    bad = broken(inputs, kind, value, rows, slots_from(FIRST_BAD))
    before, after = (run(backend, each, SIZES, PACKING) for each in (inputs, bad))
    assert torch.equal(after.ids[:FIRST_BAD], before.ids[:FIRST_BAD])
    for one, other in zip(before.branches(), after.branches(), strict=True):
        assert torch.equal(one[:FIRST_BAD], other[:FIRST_BAD])
    # Whoever sees it says so: a NaN that disappears would hide a broken model.
    assert after.sliding[FIRST_BAD].isnan().all()
    assert after.selected[FIRST_BAD].isnan().all()
    assert after.compressed[FIRST_BAD + 4].isnan().all()


@pytest.mark.parametrize("kind", ["k", "v"])
def test_another_document_changes_no_bit(backend, kind):
    inputs = make_inputs(PACKING, SIZES, dtype=torch.float32)
    first = torch.arange(PACKING.num_tokens) < LENGTHS[0]
    slots = torch.arange(SIZES.num_slots(PACKING.num_tokens)) < LENGTHS[0] // 2
    bad = broken(inputs, kind, math.nan, first, slots)
    before, after = (run(backend, each, SIZES, PACKING) for each in (inputs, bad))
    for one, other in zip(before.branches(), after.branches(), strict=True):
        assert torch.equal(one[LENGTHS[0] :], other[LENGTHS[0] :])


def test_rows_of_a_cache_that_a_token_does_not_see_may_hold_anything():
    generator = torch.Generator().manual_seed(0)

    def pair(rows):
        return tuple(torch.randn(1, rows, 2, width, generator=generator) for width in (6, 5))

    position, ring = 37, 9
    pairs = CachedPairs(pair(20), pair(40), pair(ring))
    q, gate = torch.randn(1, 4, 6, generator=generator), torch.rand(1, 4, 3, generator=generator)
    arguments = (gate, torch.tensor([position]), SIZES)
    expected = GatheredDecode().attend(q, pairs, *arguments)
    window = torch.arange(position - SIZES.window + 1, position + 1) % ring
    unseen = torch.ones(ring, dtype=torch.bool).index_fill_(0, window, value=False)
    for kind in range(2):
        pairs.compressed[kind][:, SIZES.num_compressed(position + 1) :] = math.nan
        pairs.selected[kind][:, position + 1 :] = math.nan
        pairs.sliding[kind][:, unseen] = math.nan
    found = GatheredDecode().attend(q, pairs, *arguments)
    assert torch.equal(found.ids_BGS, expected.ids_BGS)
    assert torch.equal(found.out_BHE, expected.out_BHE)
