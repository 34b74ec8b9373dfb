"""Text of ids that arrive one by one, held back while a character is not whole."""

from collections.abc import Iterable, Iterator

from nsa_core.data.tokenizer import Tokenizer

#: What stands for bytes that are no UTF-8; at the end of a text, a character may be unfinished.
UNREADABLE = "\ufffd"
#: A character has at most 4 bytes: more unreadable ids than that are broken for good.
MAX_HELD = 4


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Pieces that join to the decoded text; bytes that never become a character are U+FFFD."""
    held: list[int] = []
    for token in ids:
        held.append(token)
        text = tokenizer.decode(held)
        if text.endswith(UNREADABLE) and len(held) < MAX_HELD:
            continue
        held = []
        if text:
            yield text
    if held:
        yield tokenizer.decode(held)
