"""SHA-256 of source files, remembered by size and change time so that a resume need not wait."""

from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.base import FrozenModel
from nsa_core.data.progress import OnProgress, StageProgress
from nsa_core.data.sources.base import hash_file
from nsa_core.rundir.atomic import write_text

#: Smaller files are hashed each time: that takes less than remembering them.
MIN_REMEMBERED_BYTES = 16 * 2**20


class KnownHash(FrozenModel):
    """The hash of a file as it was at one size and change time."""

    num_bytes: int
    modified_ns: int
    sha256: str


class KnownHashes(FrozenModel):
    """Content of the memory, by absolute path."""

    files: dict[str, KnownHash] = {}


class FileHashes:
    """Hashes files, asking `progress` between pieces, and remembers the large ones.

    A file whose content changes while size and change time stay the same is not noticed; the
    shards made from it have hashes of their own.
    """

    def __init__(self, memory: Path, progress: OnProgress) -> None:
        self._memory = memory
        self._progress = progress
        self._known = _read(memory)

    def __call__(self, path: Path) -> str:
        """SHA-256 of a file.

        Raises:
            OSError: If it cannot be read.
        """
        status = path.stat()
        known = self._known.files.get(str(path.resolve()))
        if known and (known.num_bytes, known.modified_ns) == (status.st_size, status.st_mtime_ns):
            return known.sha256
        sha256 = hash_file(path, lambda _: self._progress(StageProgress("hash", detail=str(path))))
        if status.st_size >= MIN_REMEMBERED_BYTES:
            found = KnownHash(
                num_bytes=status.st_size, modified_ns=status.st_mtime_ns, sha256=sha256
            )
            self._remember(path, found)
        return sha256

    def _remember(self, path: Path, found: KnownHash) -> None:
        self._known = KnownHashes(files={**self._known.files, str(path.resolve()): found})
        write_text(self._memory, self._known.model_dump_json(indent=1) + "\n")


def _read(memory: Path) -> KnownHashes:
    """What is remembered; nothing where the file is missing or damaged: it only saves time."""
    try:
        return KnownHashes.model_validate_json(memory.read_bytes())
    except (FileNotFoundError, ValidationError):
        return KnownHashes()
