"""Seeded text without meaning, for smoke tests and benches only."""

import random
from collections.abc import Iterator

from nsa_core.data.documents import Document, Origin, Tallies
from nsa_core.data.progress import OnProgress, ignore_progress
from nsa_core.data.sources.base import HashOf, SourcePosition, SourceRecord

NUM_WORDS = 512
NUM_DOCUMENTS = 512
WORDS_PER_DOCUMENT = (100, 700)


class SyntheticSource:
    """Documents of words drawn from a small random dictionary; the seed decides every letter.

    Endless where `max_tokens` stops the staging, else `NUM_DOCUMENTS` documents.
    """

    def __init__(self, seed: int, *, is_endless: bool = False) -> None:
        self.tallies = Tallies()
        self._seed = seed
        self._is_endless = is_endless

    def record(self, hash_of: HashOf) -> SourceRecord:
        """The seed is all there is."""
        del hash_of  # there are no files
        return SourceRecord(kind="synthetic", settings={"seed": self._seed})

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the documents from a number on; each has its own random stream."""
        del progress  # a local source does not wait
        words = _dictionary(self._seed)
        number = start.num_documents
        while self._is_endless or number < NUM_DOCUMENTS:
            draw = random.Random(f"{self._seed}/{number}")  # noqa: S311 - text, not a secret
            count = draw.randint(*WORDS_PER_DOCUMENT)
            number += 1
            origin = Origin("synthetic", number)
            self.tallies.take(origin)
            yield Document(" ".join(draw.choices(words, k=count)), origin)

    def remote_state(self) -> None:
        """The position is the number of a document."""


def _dictionary(seed: int) -> list[str]:
    draw = random.Random(seed)  # noqa: S311 - text, not a secret
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(NUM_WORDS)]
