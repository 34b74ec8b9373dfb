"""Pieces of text join to the whole and never show half a character."""

from hypothesis import given
from hypothesis import strategies as st

from nsa_core.data.tokenizer import ByteTokenizer
from nsa_core.evaluate.text_stream import pieces

BYTES = ByteTokenizer()


@given(st.text())
def test_text_comes_out_character_by_character(text):
    ids = BYTES.encode(text.encode("utf-8", "replace").decode()).tolist()
    found = list(pieces(BYTES, ids))
    assert "".join(found) == BYTES.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


def test_a_piece_is_given_as_soon_as_its_character_is_whole():
    seen, given_out = [], []

    def ids():
        for token in "aé€😀".encode():
            seen.append(token)
            yield token

    for piece in pieces(BYTES, ids()):
        given_out.append((piece, len(seen)))
    assert given_out == [("a", 1), ("é", 3), ("€", 6), ("😀", 10)]


def test_bytes_that_are_no_text_are_shown_and_hold_nothing_up():
    found = list(pieces(BYTES, [0xFF] * 9 + list(b"on")))
    assert "".join(found).endswith("on")
    assert len(found) >= 3
