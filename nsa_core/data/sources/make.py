"""The source that a configuration asks for, and the two sources that need no file of the user."""

import platform
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nsa_core.config.training import DataConfig
from nsa_core.data.documents import Document, RecordOrigin, Tallies, take_text
from nsa_core.data.reporting import DataError, OnProgress, ignore_progress
from nsa_core.data.sources.local import LocalSource
from nsa_core.data.sources.source import (
    HashOf,
    ReadAgain,
    Source,
    SourceFile,
    SourcePosition,
    SourceRecord,
)

#: Folders that hold tests, generated files or what is not part of the library.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "ensurepip"}
)
TOPICS = Path("pydoc_data/topics.py")
#: Empty modules, and ones in an old encoding, are a part of every library: nobody's text is lost.
NUM_LOST = 0.0
NUM_WORDS = 512
NUM_DOCUMENTS = 512
WORDS_PER_DOCUMENT = (100, 700)


def make_source(config: DataConfig, seed: int) -> Source:
    """A fresh source, read from its start."""
    if config.source == "stdlib":
        return StdlibSource()
    if config.source == "synthetic":
        return SyntheticSource(seed, is_endless=config.max_tokens > 0)
    if config.source == "fineweb_edu_local":
        return LocalSource(Path(config.path), config.text_key)
    from nsa_core.data.sources.hub import HubSource  # only here: `datasets` is slow to import

    return HubSource(config.path or "HuggingFaceFW/fineweb-edu", config.subset, config.text_key)


class StdlibSource(ReadAgain):
    """The library's `.py` files, one document each, and the help topics, one document each."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        self.tallies = Tallies()

    def files(self) -> list[Path]:
        """The library's modules without tests, sorted by their path in the library."""
        names = [path.relative_to(self.root) for path in self.root.rglob("*.py")]
        kept = [name for name in names if EXCLUDED_FOLDERS.isdisjoint(name.parts)]
        if not kept:
            message = f"the Python library in {self.root} has no .py files"
            hint = "use data.source fineweb_edu_local with a file or folder of text"
            raise DataError(message, hint)
        return sorted(kept, key=Path.as_posix)

    def record(self, hash_of: HashOf) -> SourceRecord:
        """Every file with its hash, and the version of Python it belongs to."""
        files = tuple(
            SourceFile(
                name=name.as_posix(),
                num_bytes=(self.root / name).stat().st_size,
                sha256=hash_of(self.root / name),
            )
            for name in self.files()
        )
        return SourceRecord(
            kind="stdlib", settings={"python": platform.python_version()}, files=files
        )

    def all_documents(self) -> Iterator[Document]:
        """Yield the modules in order; the help topics stand in the place of their module."""
        for name in self.files():
            if name == TOPICS:
                yield from self._topics()
            else:
                yield from self._module(name)

    def _module(self, name: Path) -> Iterator[Document]:
        origin = RecordOrigin(name.as_posix(), 1)
        try:
            text = (self.root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.tallies.reject("not UTF-8", origin, NUM_LOST)
            return
        yield from take_text(text, origin, self.tallies, NUM_LOST)

    def _topics(self) -> Iterator[Document]:
        from pydoc_data.topics import topics

        for number, title in enumerate(sorted(topics), start=1):
            yield from take_text(
                topics[title], RecordOrigin(f"{TOPICS.as_posix()}[{title}]", number), self.tallies
            )


@dataclass(eq=False)
class SyntheticSource:
    """Documents of words drawn from a small random dictionary; the seed decides every letter.

    Endless where `max_tokens` stops the staging, else `NUM_DOCUMENTS` documents.
    """

    seed: int
    is_endless: bool = False
    tallies: Tallies = field(default_factory=Tallies)

    def record(self, hash_of: HashOf) -> SourceRecord:
        """The seed is all there is."""
        del hash_of  # there are no files
        return SourceRecord(kind="synthetic", settings={"seed": self.seed})

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the documents from a number on; each has its own random stream."""
        del progress  # a local source does not wait
        words = _dictionary(self.seed)
        number = start.num_documents
        while self.is_endless or number < NUM_DOCUMENTS:
            draw = random.Random(f"{self.seed}/{number}")  # noqa: S311 - text, not a secret
            count = draw.randint(*WORDS_PER_DOCUMENT)
            number += 1
            origin = RecordOrigin("synthetic", number)
            self.tallies.take(origin)
            yield Document(" ".join(draw.choices(words, k=count)), origin)

    def remote_place(self) -> None:
        """The position is the number of a document."""


def _dictionary(seed: int) -> list[str]:
    draw = random.Random(seed)  # noqa: S311 - text, not a secret
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(NUM_WORDS)]
