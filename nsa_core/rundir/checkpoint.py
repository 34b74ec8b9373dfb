"""Checkpoint: which files it has, and whether they are whole; opening it is the trainer's work."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.base import FrozenModel, TolerantModel, one_line
from nsa_core.rundir.attempt_id import AttemptId
from nsa_core.rundir.bounded_json import MANIFEST, parse_model, read_bounded
from nsa_core.rundir.layout import CHECKPOINT_NAME, RunDir
from nsa_core.rundir.names import checkpoint_fault

MANIFEST_NAME = "checkpoint.json"
#: Weights of the model, and the configuration they were trained with.
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
_MAX_NAME_BYTES = 1024


class CheckpointFile(FrozenModel):
    """One file of a checkpoint: name, size in bytes, sha256 in hex."""

    name: str
    size: int
    sha256: str


class CheckpointManifest(TolerantModel):
    """Content of checkpoint.json, written last into the temporary folder before the rename.

    Attributes:
        run_id: Run that wrote it.
        attempt: Its attempt.
        attempt_id: Identity of that attempt; empty in a checkpoint of an older version.
        step: Optimizer steps done.
        tokens_seen: Tokens consumed.
        created_unix_s: When.
        config_sha256: Hash of the resolved configuration.
        tokenizer_fingerprint: Tokenizer that the ids belong to.
        files: All other files of the folder.
    """

    schema_version: int = 1
    run_id: str
    attempt: int
    attempt_id: AttemptId = ""
    step: int
    tokens_seen: int
    created_unix_s: float
    config_sha256: str
    tokenizer_fingerprint: str = ""
    files: list[CheckpointFile]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def fault(self) -> str | None:
        """Why its list of files must not be followed, such as a name in another folder."""
        return checkpoint_fault(self.files, MANIFEST_NAME)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with a manifest that can be read; its content may still be damaged."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def hash_file(path: Path) -> str:
    """sha256 of a file in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None without a readable manifest: then it is not whole."""
    found = open_checkpoint(path)
    return found if isinstance(found, Checkpoint) else None


def open_checkpoint(path: Path) -> Checkpoint | str:
    """The checkpoint in a folder, or in one line why its manifest cannot be read."""
    try:
        content = read_bounded(path / MANIFEST_NAME, MANIFEST.max_bytes)
        return Checkpoint(path, parse_manifest(content))
    except (FileNotFoundError, NotADirectoryError):
        return f"has no {MANIFEST_NAME}: it is not whole"
    except OSError as error:
        return f"{MANIFEST_NAME} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{MANIFEST_NAME} cannot be read: {one_line(error)}"


def parse_manifest(content: bytes) -> CheckpointManifest:
    """A manifest from the bytes of its file; `fault` says whether its files may be followed.

    Raises:
        ValueError: If it is over a limit, or no manifest.
    """
    return parse_model(CheckpointManifest, content, MANIFEST)


def find_misfit(checkpoint: Checkpoint) -> str | None:
    """The first file that is missing or has another size, in one line; nothing is hashed."""
    if checkpoint.manifest.fault is not None:
        return f"{MANIFEST_NAME} {checkpoint.manifest.fault}"
    for expected in checkpoint.manifest.files:
        try:
            size = (checkpoint.path / expected.name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{expected.name} is missing"
        except OSError as error:
            return _cannot_be_read(expected.name, error)
        if size != expected.size:
            return f"{expected.name} has {size} bytes instead of {expected.size}"
    return None


def find_damage(checkpoint: Checkpoint) -> str | None:
    """Hash every file; the first difference in one line, or None if the checkpoint is whole."""
    misfit = find_misfit(checkpoint)
    if misfit is not None:
        return misfit
    for expected in checkpoint.manifest.files:
        try:
            found = hash_file(checkpoint.path / expected.name)
        except OSError as error:  # a folder in its place, or a disk that gives a part of it no more
            return _cannot_be_read(expected.name, error)
        if found != expected.sha256:
            return f"{expected.name} does not have its sha256 {expected.sha256[:12]}…"
    return None


def _cannot_be_read(name: str, error: OSError) -> str:
    return f"{name} cannot be read: {error.strerror}"


def read_known_good_name(run: RunDir) -> str:
    """Name of the checkpoint that clean steps have proven; empty where none is named yet.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it holds no text, or too much.
    """
    try:
        return read_bounded(run.known_good, _MAX_NAME_BYTES).decode().strip()
    except FileNotFoundError:
        return ""


def list_checkpoint_folders(run: RunDir) -> list[Path]:
    """All folders under checkpoints/ that are named as one, highest step first, whole or not."""
    if not run.checkpoints.is_dir():
        return []
    named = [
        (int(name[1]), folder)
        for folder in run.checkpoints.iterdir()
        if (name := CHECKPOINT_NAME.fullmatch(folder.name)) and folder.is_dir()
    ]
    return [folder for _, folder in sorted(named, reverse=True)]


def list_checkpoints(run: RunDir) -> list[Checkpoint]:
    """All folders under checkpoints/ that have a manifest, newest step first; not yet verified."""
    if not run.checkpoints.is_dir():
        return []
    found = [
        checkpoint
        for folder in run.checkpoints.iterdir()
        if CHECKPOINT_NAME.fullmatch(folder.name)
        and (checkpoint := read_checkpoint(folder)) is not None
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)
