"""Documents in a row and the slots of their compressed blocks."""

import pytest
import torch

from nsa_core.kernels.packing import Packing, compressed_slots
from tests.core.kernels.cases import DOCUMENTS, GEOMETRIES


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_token_knows_its_document(lengths):
    packing = Packing.from_lengths(lengths)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        assert packing.start_N[rows].tolist() == [start] * length
        assert packing.position_N[rows].tolist() == list(range(length))
        assert packing.length_N[rows].tolist() == [length] * length
        start += length


def test_document_ids_cut_where_they_change_and_at_each_row():
    ids = torch.tensor([[7, 7, 2, 2, 2, 7], [7, 7, 7, 7, 7, 1]])
    packing = Packing.from_document_ids(ids)
    expected = Packing.from_lengths([2, 3, 1, 5, 1])
    assert torch.equal(packing.start_N, expected.start_N)
    assert torch.equal(packing.length_N, expected.length_N)
    assert packing.max_seqlen == 6


def test_a_bound_on_the_documents_keeps_the_kernels_from_counting_on_one_a_token():
    ids = torch.tensor([[7, 7, 2, 2, 2, 7], [7, 7, 7, 7, 7, 1]])
    bounded, exact = Packing.from_document_ids(ids, max_documents=6), Packing.from_document_ids(ids)
    assert bounded.cu_seqlens.tolist() == [0, 2, 5, 6, 11, 12, 12]
    assert torch.equal(bounded.start_N, exact.start_N)
    assert torch.equal(bounded.length_N, exact.length_N)


def test_more_documents_than_the_bound_are_not_cut_off_in_silence():
    ids = torch.tensor([[7, 7, 2, 2, 2, 7]])
    with pytest.raises(RuntimeError, match="max_documents=2"):
        Packing.from_document_ids(ids, max_documents=2)


def test_a_plain_batch_is_documents_of_equal_length():
    packing = Packing.uniform(3, 5)
    assert packing.cu_seqlens.tolist() == [0, 5, 10, 15]
    assert packing.uniform_length == 5


@pytest.mark.parametrize("bad", [[], [3, 0]])
def test_documents_without_tokens_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        Packing.from_lengths(bad)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_each_compressed_block_has_its_own_slot_and_no_other_slot_is_used(geometry, lengths):
    slots = compressed_slots(Packing.from_lengths(lengths), geometry)
    expected, start = {}, 0
    for length in lengths:
        for block in range(geometry.num_compressed(length)):
            slot = start // geometry.compress_stride + block
            assert slot not in expected
            expected[slot] = (start + block * geometry.compress_stride, block)
        start += length
    found = {
        slot: (slots.first_row_C[slot].item(), slots.position_C[slot] / geometry.compress_stride)
        for slot in torch.nonzero(slots.exists_C).flatten().tolist()
    }
    assert found == expected
