# ruff: noqa: INP001 - a script, and no part of a package
"""Write the prose of Debian's documentation packages, and of folders of text, as shuffled JSONL.

`apt-get download anarchism python3.11-doc perl-doc linux-doc-6.1`, then
`python tools/debian_text.py *.deb --folder /usr/lib/python3.11 --out text.jsonl.zst`. Documents
come in the order of their content hashes, so that a stage that stops at `data.max_tokens` takes
some of every package; the same inputs give the same bytes. Standard library and zstandard only.
"""

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

import zstandard

#: Members of each package that hold its prose once: sources where they are whole, else pages.
PARTS = {
    "anarchism": (".md.gz",),
    "linux-doc": (".html",),
    "perl-doc": (".pod",),
    "python3": (".rst.txt",),
}
#: Indexes, and other languages, which a small vocabulary spells byte by byte.
LEFT_OUT = ("/translations/", "genindex", "search.html", "/_static/")
FOLDER_SUFFIXES = (".py", ".txt")
FOLDER_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
MIN_CHARACTERS = 200
BLOCKS = frozenset(
    {"p", "div", "li", "tr", "pre", "h1", "h2", "h3", "h4", "dt", "dd", "br", "section"}
)


class _Prose(HTMLParser):
    """Collects the text inside the main part of a page, or of the whole page where it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[str] = []
        self.main: list[str] = []
        self._hidden = 0
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "style", "nav"):
            self._hidden += 1
        is_main = values.get("role") == "main" or values.get("class") == "body"
        if tag == "div" and (self._depth or is_main):
            self._depth += 1
        if tag in BLOCKS:
            self._add("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "nav"):
            self._hidden = max(0, self._hidden - 1)
        if tag == "div" and self._depth:
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add(self, text: str) -> None:
        if not self._hidden:
            self.whole.append(text)
            if self._depth:
                self.main.append(text)


def page_text(page: str) -> str:
    """The prose of a page, at most one blank line at a time."""
    parser = _Prose()
    parser.feed(page)
    lines = [line.rstrip() for line in "".join(parser.main or parser.whole).split("\n")]
    kept = [line for number, line in enumerate(lines) if line or (number and lines[number - 1])]
    return "\n".join(kept).replace("¶", "").strip() + "\n"


def read_package(path: Path) -> Iterator[str]:
    """Documents of a .deb file."""
    suffixes = next(found for name, found in PARTS.items() if path.name.startswith(name))
    words = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as unpack,
        tarfile.open(fileobj=unpack.stdout, mode="r|") as members,
    ):
        for member in members:
            is_left_out = any(part in member.name for part in LEFT_OUT)
            if not member.isfile() or is_left_out or not member.name.endswith(suffixes):
                continue
            file = members.extractfile(member)
            content = file.read() if file else b""
            content = gzip.decompress(content) if member.name.endswith(".gz") else content
            text = content.decode("utf-8", errors="replace")
            yield page_text(text) if ".html" in PurePosixPath(member.name).suffixes else text


def read_folder(folder: Path) -> Iterator[str]:
    """Text and Python files below a folder, tests left out."""
    for path in sorted(folder.rglob("*")):
        is_left_out = FOLDER_LEFT_OUT.intersection(path.relative_to(folder).parts)
        if path.suffix in FOLDER_SUFFIXES and path.is_file() and not is_left_out:
            yield path.read_text(encoding="utf-8", errors="replace")


def main() -> None:
    """Write the file and say how much is in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", type=Path)
    parser.add_argument("--folder", action="append", default=[], type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    texts: dict[str, str] = {}
    sources = [*map(read_package, options.packages), *map(read_folder, options.folder)]
    for text in (text for source in sources for text in source):
        if len(text) >= MIN_CHARACTERS:
            texts[hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()] = text
    with zstandard.open(options.out, "wt", encoding="utf-8", errors="replace") as out:
        for key in sorted(texts):
            out.write(json.dumps({"text": texts[key]}) + "\n")
    num_bytes = sum(len(text.encode("utf-8", errors="replace")) for text in texts.values())
    sys.stderr.write(f"{len(texts)} documents, {num_bytes / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
