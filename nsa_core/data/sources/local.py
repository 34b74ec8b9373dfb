"""A file or folder of JSONL, Parquet and text files as one source, in the order of their names."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nsa_core.data.documents import Document, RecordOrigin, Tallies
from nsa_core.data.lines import UnreadableFile, find_packing, packing_by_name
from nsa_core.data.reporting import DataError
from nsa_core.data.sources.source import HashOf, ReadAgain, SourceFile, SourceRecord
from nsa_core.data.sources.text_files import piece_bytes, read_jsonl, read_plain
from nsa_core.rundir.data_account import HIDDEN

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PLAIN_SUFFIXES = (".txt", ".text", ".md")
COMPRESSIONS = (".gz", ".zst")
#: How much longer text is than its gzip, zstd or Parquet form, roughly.
UNPACKED = 3
#: Text behind one of these is text that is lost, where any other unknown file may be no data.
UNREAD_COMPRESSIONS = (".bz2", ".xz", ".zip", ".lz4", ".7z")
LINKED_FOLDER = "link to a folder, not followed"
KNOWN = ".jsonl, .json, .ndjson, .txt, .text, .md (each also .gz or .zst) and .parquet"


def file_kind(name: str) -> str | None:
    """`jsonl`, `plain` or `parquet` by a file's name; None where it is neither."""
    stem, suffix = _split_suffix(name)
    if suffix in COMPRESSIONS:
        suffix = _split_suffix(stem)[1]
    elif suffix == ".parquet":
        return "parquet"
    if suffix in JSON_SUFFIXES:
        return "jsonl"
    return "plain" if suffix in PLAIN_SUFFIXES else None


def _is_packed(name: str) -> bool:
    return _split_suffix(name)[1] in (*COMPRESSIONS, ".parquet")


def _split_suffix(name: str) -> tuple[str, str]:
    """Stem and suffix in lower case, as of a Path, which takes ten times as long for 200,000."""
    dot = name.rfind(".")
    has_suffix = 0 < dot < len(name) - 1
    return (name[:dot], name[dot:].lower()) if has_suffix else (name, "")


def is_lost_text(name: str) -> bool:
    """Whether a file's name says text in a compression that is not read here."""
    stem, suffix = _split_suffix(name)
    return suffix in UNREAD_COMPRESSIONS and file_kind(stem) is not None


@dataclass(frozen=True)
class _Found:
    """A file; `kind` is None, and `left_out` says why, where it is not read."""

    name: str
    path: Path
    kind: str | None
    left_out: str = "unknown kind of file"


class LocalSource(ReadAgain):
    """Every document of a file, or of the files of a folder and the folders in it.

    Raises:
        DataError: If the path does not exist or holds no file of a known kind.
    """

    def __init__(self, path: Path, text_key: str) -> None:
        self.tallies = Tallies()
        self._path = path
        self._text_key = text_key
        self._found, self._no_data = _find_files(path)
        self._is_alone = path.is_file()

    def record(self, hash_of: HashOf) -> SourceRecord:
        """Every file that is read, with its hash; the place of the folder does not matter."""
        files = tuple(_describe(found, hash_of) for found in self._found if found.kind is not None)
        settings: dict[str, str | int] = {
            "text_key": self._text_key,
            "form": "file" if self._is_alone else "folder",
        }
        return SourceRecord(kind="fineweb_edu_local", settings=settings, files=files)

    def text_bytes(self) -> int:
        """Bytes of the files that are read; packed ones count as text `UNPACKED` times as long."""
        sizes = ((found.path.stat().st_size, found.name) for found in self._found if found.kind)
        return sum(size * (UNPACKED if _is_packed(name) else 1) for size, name in sizes)

    def all_documents(self) -> Iterator[Document]:
        """Yield the documents file by file."""
        for name, reason in self._no_data:
            self.tallies.passed_over.add(reason, RecordOrigin(name, 0))
        for found in self._found:
            try:
                yield from self._read(found)
            except UnreadableFile as why:
                self.tallies.reject(str(why), RecordOrigin(found.name, 0))
            except OSError as error:
                raise _unreadable(found.path, error) from error

    def _read(self, found: _Found) -> Iterator[Document]:
        origin = RecordOrigin(found.name, 0)
        if found.kind is None:
            self.tallies.reject(found.left_out, origin, float(is_lost_text(found.name)))
            return
        if found.path.stat().st_size == 0:
            self.tallies.passed_over.add("empty file", origin)
            return
        yield from self._read_kind(found)

    def _read_kind(self, found: _Found) -> Iterator[Document]:
        if found.kind == "parquet":
            from nsa_core.data.sources.parquet import read_parquet  # only here: pyarrow is large

            return read_parquet(found.path, found.name, self._text_key, self.tallies)
        self._note_packing(found)
        if found.kind == "jsonl":
            return read_jsonl(found.path, found.name, self._text_key, self.tallies)
        limit = piece_bytes(found.path.stat().st_size, is_alone=self._is_alone)
        return read_plain(found.path, found.name, limit, self.tallies)

    def _note_packing(self, found: _Found) -> None:
        """Say where a file is not packed as its name says."""
        packing = find_packing(found.path)
        if packing == packing_by_name(found.name):
            return
        is_as = f"{packing} by its first bytes" if packing else "not packed by its first bytes"
        self.tallies.repaired.add(f"{is_as}, not as its name says", RecordOrigin(found.name, 0))


def _describe(found: _Found, hash_of: HashOf) -> SourceFile:
    try:
        num_bytes, sha256 = found.path.stat().st_size, hash_of(found.path)
    except OSError as error:
        raise _unreadable(found.path, error) from error
    return SourceFile(name=found.name, num_bytes=num_bytes, sha256=sha256)


def _unreadable(path: Path, error: OSError) -> DataError:
    message = f"{path} cannot be read: {error.strerror or error}"
    return DataError(message, "check the file and its permissions")


def _find_files(path: Path) -> tuple[list[_Found], list[tuple[str, str]]]:
    """The files, and what is no data: names with the reason."""
    try:
        if not path.exists():
            message = f"data.path {path} does not exist"
            raise DataError(message, "correct data.path, or copy the data there")
        if path.is_file():
            found = [_Found(_printed(path.name), path, file_kind(path.name))]
            no_data: list[tuple[str, str]] = []
        elif path.is_dir():
            found, no_data = _walk(path)
        else:
            message = f"data.path {path} is neither a file nor a folder"
            raise DataError(message, "correct data.path, or copy the data into a file")
    except OSError as error:
        raise _unreadable(Path(error.filename or path), error) from error
    if not any(file.kind for file in found):
        what = "is not" if path.is_file() else f"holds {len(found)} files, none of them"
        message = f"data.path {path} {what} a file of a known kind"
        raise DataError(message, f"known are {KNOWN}")
    return found, no_data


def _walk(folder: Path) -> tuple[list[_Found], list[tuple[str, str]]]:
    """The files below a folder, and what is no data, each sorted by name."""
    found: list[_Found] = []
    no_data: list[tuple[str, str]] = []
    folders = [("", folder)]
    while folders:
        prefix, current = folders.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                name = prefix + _printed(entry.name)
                kind = _entry_kind(entry)
                if kind == "folder":
                    folders.append((f"{name}/", Path(entry.path)))
                elif kind == "file":
                    found.append(_Found(name, Path(entry.path), file_kind(entry.name)))
                elif kind == LINKED_FOLDER:
                    found.append(_Found(name, Path(entry.path), None, LINKED_FOLDER))
                else:
                    no_data.append((name, kind))
    return sorted(found, key=lambda one: one.name), sorted(no_data)


def _entry_kind(entry: os.DirEntry[str]) -> str:
    """`file`, `folder`, or why it is not read; a link that leads nowhere is a file that fails."""
    if entry.name.startswith("."):
        return HIDDEN
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    if entry.is_dir():
        return LINKED_FOLDER
    if entry.is_file() or (entry.is_symlink() and not Path(entry.path).exists()):
        return "file"
    return "neither a file nor a folder (FIFO, socket or device)"


def _printed(name: str) -> str:
    """A name as origins have it: printable where it is not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")
