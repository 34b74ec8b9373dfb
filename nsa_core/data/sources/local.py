"""A file or folder of JSONL, Parquet and text files as one source, in the order of their names."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from nsa_core.data.documents import Document, Origin, Tallies
from nsa_core.data.errors import DataError
from nsa_core.data.progress import OnProgress, ignore_progress
from nsa_core.data.sources.base import (
    HashOf,
    SourceFile,
    SourcePosition,
    SourceRecord,
    skip_documents,
)
from nsa_core.data.sources.jsonl import read_jsonl
from nsa_core.data.sources.plain import piece_bytes, read_plain

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PLAIN_SUFFIXES = (".txt", ".text", ".md")
COMPRESSIONS = (".gz", ".zst")
KNOWN = ".jsonl, .json, .ndjson, .txt, .text, .md (each also .gz or .zst) and .parquet"


def file_kind(path: Path) -> str | None:
    """`jsonl`, `plain` or `parquet` by the file's name; None where it is neither."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        suffix = path.with_suffix("").suffix.lower()
    elif suffix == ".parquet":
        return "parquet"
    if suffix in JSON_SUFFIXES:
        return "jsonl"
    return "plain" if suffix in PLAIN_SUFFIXES else None


@dataclass(frozen=True)
class _Found:
    """A file; `kind` is None, and `left_out` says why, where it is not read."""

    name: str
    path: Path
    kind: str | None
    left_out: str = "unknown kind of file"


class LocalSource:
    """Every document of a file, or of the files of a folder and the folders in it.

    Raises:
        DataError: If the path does not exist or holds no file of a known kind.
    """

    def __init__(self, path: Path, text_key: str) -> None:
        self.tallies = Tallies()
        self._path = path
        self._text_key = text_key
        self._found = _find_files(path)
        self._is_alone = path.is_file()

    def record(self, hash_of: HashOf) -> SourceRecord:
        """Every file that is read, with its hash; the place of the folder does not matter."""
        files = tuple(_describe(found, hash_of) for found in self._found if found.kind is not None)
        settings: dict[str, str | int] = {
            "text_key": self._text_key,
            "form": "file" if self._is_alone else "folder",
        }
        return SourceRecord(kind="fineweb_edu_local", settings=settings, files=files)

    def documents(
        self, start: SourcePosition, progress: OnProgress = ignore_progress
    ) -> Iterator[Document]:
        """Yield the documents file by file; what was read before is read again and passed over."""
        del progress  # a local source does not wait
        return skip_documents(self._all_documents(), start.num_documents)

    def remote_state(self) -> None:
        """A local source is read again instead."""

    def _all_documents(self) -> Iterator[Document]:
        for found in self._found:
            try:
                yield from self._read(found)
            except OSError as error:
                raise _unreadable(found.path, error) from error

    def _read(self, found: _Found) -> Iterator[Document]:
        if found.kind == "jsonl":
            return read_jsonl(found.path, found.name, self._text_key, self.tallies)
        if found.kind == "parquet":
            from nsa_core.data.sources.parquet import read_parquet  # only here: pyarrow is large

            return read_parquet(found.path, found.name, self._text_key, self.tallies)
        if found.kind == "plain":
            limit = piece_bytes(found.path.stat().st_size, is_alone=self._is_alone)
            return read_plain(found.path, found.name, limit, self.tallies)
        self.tallies.rejected.add(found.left_out, Origin(found.name, 0))
        return iter(())


def _describe(found: _Found, hash_of: HashOf) -> SourceFile:
    try:
        num_bytes, sha256 = found.path.stat().st_size, hash_of(found.path)
    except OSError as error:
        raise _unreadable(found.path, error) from error
    return SourceFile(name=found.name, num_bytes=num_bytes, sha256=sha256)


def _unreadable(path: Path, error: OSError) -> DataError:
    message = f"{path} cannot be read: {error.strerror or error}"
    return DataError(message, "check the file and its permissions")


def _find_files(path: Path) -> list[_Found]:
    try:
        if not path.exists():
            message = f"data.path {path} does not exist"
            raise DataError(message, "correct data.path, or copy the data there")
        found = [_describe_path(path, path.parent)] if path.is_file() else _walk(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not any(file.kind for file in found):
        what = "is not" if path.is_file() else f"holds {len(found)} files, none of them"
        message = f"data.path {path} {what} a file of a known kind"
        raise DataError(message, f"known are {KNOWN}")
    return found


def _walk(folder: Path) -> list[_Found]:
    """The files below a folder, sorted by name; hidden ones are no data.

    Raises:
        OSError: If a folder cannot be listed.
    """
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent) / name for name in names if not name.startswith(".")]
        paths += [Path(parent) / name for name in folders if (Path(parent) / name).is_symlink()]
    return sorted((_describe_path(p, folder) for p in paths), key=lambda found: found.name)


def _describe_path(path: Path, folder: Path) -> _Found:
    """The file as origins name it: relative, and printable where its name is not UTF-8."""
    name = os.fsencode(path.relative_to(folder).as_posix()).decode(errors="backslashreplace")
    if path.is_dir():
        return _Found(name, path, None, "link to a folder, not followed")
    return _Found(name, path, file_kind(path))


def _raise(error: OSError) -> NoReturn:
    raise error
