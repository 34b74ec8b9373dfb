"""Tokenizer: text to ids and back, and the byte tokenizer, which needs no vocabulary."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]


class Tokenizer(Protocol):
    """Turns text into ids; `end_id` stands after every document and is never made from text.

    Attributes:
        name: `byte`, `gpt2` or `bpe`.
        vocab_size: Number of ids, `end_id` included.
        end_id: The end-of-document token.
        fingerprint: SHA-256 of everything that decides the ids of a text.
    """

    name: str
    vocab_size: int
    end_id: int
    fingerprint: str

    def encode(self, text: str) -> Ids:
        """The ids of a text, without an end token."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of several texts; the same as `encode` of each."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD, end tokens vanish."""

    def token_num_bytes(self) -> NDArray[np.int32]:
        """Bytes of text that each id stands for [vocab_size]; 0 for the end token."""

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` needs into a folder; nothing for `byte`."""


class ByteTokenizer:
    """Each byte of the UTF-8 text is an id; id 256 ends a document."""

    name = "byte"
    vocab_size = 257
    end_id = 256
    fingerprint = hashlib.sha256(b"byte/1: 256 bytes, end 256").hexdigest()

    def encode(self, text: str) -> Ids:
        """The UTF-8 bytes of a text; a lone surrogate is three bytes that decode to U+FFFD."""
        content = text.encode("utf-8", errors="surrogatepass")
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some bytes; ids from 256 on are no text."""
        return bytes(number for number in ids if number < self.end_id).decode(
            "utf-8", errors="replace"
        )

    def token_num_bytes(self) -> NDArray[np.int32]:
        """One byte each, none for the end token."""
        lengths = np.ones(self.vocab_size, dtype=np.int32)
        lengths[self.end_id] = 0
        return lengths

    def save(self, folder: Path) -> None:
        """There is nothing to save."""
