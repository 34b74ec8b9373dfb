"""The text of this machine's own Python library: real text anywhere, without a download."""

import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nsa_core.data.documents import Document, Origin, Tallies, take_text
from nsa_core.data.errors import DataError
from nsa_core.data.progress import OnProgress, ignore_progress
from nsa_core.data.sources.base import (
    HashOf,
    SourceFile,
    SourcePosition,
    SourceRecord,
    skip_documents,
)

#: Folders that hold tests, generated files or what is not part of the library.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "ensurepip"}
)
TOPICS = Path("pydoc_data/topics.py")
#: Empty modules, and ones in an old encoding, are a part of every library: nobody's text is lost.
NUM_LOST = 0.0


class StdlibSource:
    """The library's `.py` files, one document each, and the help topics, one document each."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        self.tallies = Tallies()

    def files(self) -> list[Path]:
        """The library's modules without tests, sorted by their path in the library.

        Raises:
            DataError: If this Python has no library in source form.
        """
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

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the modules in order; the help topics stand in the place of their module."""
        del progress  # a local source does not wait
        return skip_documents(self._all_documents(), start.num_documents)

    def remote_state(self) -> None:
        """A local source is read again instead."""

    def _all_documents(self) -> Iterator[Document]:
        for name in self.files():
            if name == TOPICS:
                yield from self._topics()
            else:
                yield from self._module(name)

    def _module(self, name: Path) -> Iterator[Document]:
        origin = Origin(name.as_posix(), 1)
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
                topics[title], Origin(f"{TOPICS.as_posix()}[{title}]", number), self.tallies
            )
