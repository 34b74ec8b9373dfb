"""Rows of known tokens become the targets and borders that were worked out by hand."""

import numpy as np

from nsa_core.data.batch import IGNORED, BatchShape, TokenBatch, make_batch

END = 9
#: Token n stands for n bytes of text, the end token for none.
NUM_BYTES = np.asarray([*range(END), 0], dtype=np.int32)


def batch(*rows, pack: bool = True) -> TokenBatch:
    shape = BatchShape(4, pack, END, NUM_BYTES)
    return make_batch([np.asarray(row, dtype=np.int64) for row in rows], shape)


def test_a_document_border_inside_a_row() -> None:
    made = batch([1, 2, END, 3, 4])
    assert made.tokens_BT.tolist() == [[1, 2, END, 3]]
    assert made.targets_BT.tolist() == [[2, END, IGNORED, 4]]
    assert made.cu_seqlens.tolist() == [0, 3, 4]
    assert (made.max_seqlen, made.num_targets, made.num_text_bytes) == (3, 3, 2 + 4)


def test_a_document_border_at_the_end_of_a_row_is_one_border() -> None:
    made = batch([1, 2, 3, END, 5], [5, 6, 7, 8, END])
    assert made.targets_BT.tolist() == [[2, 3, END, IGNORED], [6, 7, 8, END]]
    assert made.cu_seqlens.tolist() == [0, 4, 8]


def test_a_short_last_row_predicts_nothing_after_its_text() -> None:
    made = batch([1, END])
    assert made.tokens_BT.tolist() == [[1, END, END, END]]
    assert made.targets_BT.tolist() == [[END, IGNORED, IGNORED, IGNORED]]
    assert made.cu_seqlens.tolist() == [0, 2, 4]


def test_a_text_that_is_cut_within_a_document_is_a_segment_apart_from_what_fills_the_row() -> None:
    made = batch([1, 2])
    assert made.tokens_BT.tolist() == [[1, 2, END, END]]
    assert made.cu_seqlens.tolist() == [0, 2, 4]


def test_an_empty_row_predicts_nothing() -> None:
    made = batch([1, 2, 3, 4, 5], [])
    assert made.targets_BT[1].tolist() == [IGNORED] * 4
    assert made.cu_seqlens.tolist() == [0, 4, 8]


def test_without_packing_only_the_rows_are_segments_and_the_targets_are_the_same() -> None:
    rows = ([1, END, 2, END, 3], [3, 4, END, 5, 6])
    packed, unpacked = batch(*rows), batch(*rows, pack=False)
    assert packed.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert unpacked.cu_seqlens.tolist() == [0, 4, 8]
    assert unpacked.targets_BT.tolist() == packed.targets_BT.tolist()
