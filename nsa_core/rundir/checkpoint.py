"""Checkpoint: which files it has, and whether it is whole; loading it is the trainer's work."""

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from nsa_core.config.base import FrozenModel, TolerantModel, one_line
from nsa_core.rundir.bounded_json import MANIFEST, parse_model, read_bounded
from nsa_core.rundir.layout import CHECKPOINT_NAME, RunDir
from nsa_core.rundir.manifest import AttemptId
from nsa_core.rundir.names import FileEntry, checkpoint_fault, path_fault, show_number

MANIFEST_NAME = "checkpoint.json"
#: Weights of the model, what the optimizer keeps, and the configuration they were trained with.
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
CONFIG_FILE = "config.json"
#: What one rank wrote of a checkpoint in shards; see checkpoint_shards.py.
SHARD_FILE = "shard.json"
#: Damage of a checkpoint whose folder is not there.
NO_FOLDER = "does not exist"
_MAX_NAME_BYTES = 1024
_HASH_BYTES = 2**20
_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def rank_file(name: str, rank: int) -> str:
    """Name of one rank's file: `model_rank3.safetensors` for `model.safetensors`."""
    stem, _, ending = name.partition(".")
    return f"{stem}_rank{rank}.{ending}"


class CheckpointFile(FrozenModel):
    """One file of a checkpoint: name, size in bytes, sha256 in hex."""

    name: str
    size: int
    sha256: str


class CheckpointManifest(TolerantModel):
    """Content of checkpoint.json, written last into the temporary folder before the rename.

    Attributes:
        attempt_id: Identity of the attempt; empty in a checkpoint of an older version.
        step: Optimizer steps done.
        config_sha256: Hash of the resolved configuration.
        tokenizer_fingerprint: Tokenizer that the ids belong to.
        num_shards: Ranks that wrote weights and optimizer state, each its rows; 0 where one rank
            wrote them whole.
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
    num_shards: int = 0
    files: list[CheckpointFile]

    @property
    def tensor_files(self) -> list[str]:
        """Files without which neither weights nor optimizer state can be loaded."""
        if not self.num_shards:
            return [MODEL_FILE, OPTIMIZER_FILE]
        names = (SHARD_FILE, MODEL_FILE, OPTIMIZER_FILE)
        return [rank_file(name, rank) for rank in range(self.num_shards) for name in names]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def fault(self) -> str | None:
        """Why its list of files must not be followed, such as a name in another folder."""
        return checkpoint_fault(self.files, MANIFEST_NAME) or self._shard_fault()

    def _shard_fault(self) -> str | None:
        """Why its shards cannot be complete; the number is checked before it is counted to."""
        if not 0 <= self.num_shards <= len(self.files):
            found = f"{show_number(self.num_shards)} shards"
            return f"claims {found} and lists {len(self.files)} files"
        if not self.num_shards:
            return None
        listed = {file.name for file in self.files}
        missing = [name for name in self.tensor_files if name not in listed]
        return f"has {self.num_shards} shards and does not list {missing[0]}" if missing else None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with a manifest that can be read; its content may still be damaged."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


@dataclass(frozen=True)
class Flaw:
    """One file that is not what was recorded of it: `expected` and `found` in words."""

    path: Path
    expected: str
    found: str

    @property
    def sentence(self) -> str:
        """The flaw in one line."""
        return f"`{self.path}` should be {self.expected} and is {self.found}"

    @property
    def short(self) -> str:
        """The same with the file's name alone and the beginning of each hash."""
        text = f"{self.path.name} should be {self.expected} and is {self.found}"
        return _SHA256.sub(r"\1…", text)


class CheckpointState(TolerantModel):
    """A checkpoint folder as it is now: whole, or everything that is wrong with it.

    The agent on a pod answers with it, without the last three fields.

    Attributes:
        damage: What is wrong with it, in one line; empty if it is whole.
        run_id: Run that wrote it; empty if it has no readable manifest.
        attempt: Its attempt; 0 where that is not known.
        attempt_id: Identity of that attempt; empty where that is not known.
        manifest_sha256: Hash of checkpoint.json, as a receipt names it.
        manifest: Its manifest; None if that cannot be read.
        flaws: Every file that is not as recorded.
    """

    path: str
    damage: str = ""
    run_id: str = ""
    attempt: int = 0
    attempt_id: str = ""
    step: int = -1
    tokens_seen: int = 0
    total_bytes: int = 0
    created_unix_s: float = 0.0
    manifest_sha256: str = Field("", exclude=True)
    manifest: CheckpointManifest | None = Field(None, exclude=True)
    flaws: list[Flaw] = Field([], exclude=True)


def hash_file(path: Path, on_bytes: Callable[[int], object] = int) -> str:
    """sha256 of a file in hex; `on_bytes` gets the size of each piece that was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
            on_bytes(len(piece))
    return digest.hexdigest()


def inspect_checkpoint(
    path: Path, *, with_hashes: bool = True, follow_links: bool = True
) -> CheckpointState:
    """The one answer to whether a checkpoint is whole.

    Args:
        path: Its folder. One named `step_N` has to be of step N.
        with_hashes: Read every byte; otherwise only sizes are compared.
        follow_links: Off where the folder came from another machine: a link is then a flaw.
    """
    if not path.is_dir():
        return CheckpointState(path=str(path), damage=NO_FOLDER, flaws=[_missing_manifest(path)])
    read = _read_manifest(path, follow_links=follow_links)
    if isinstance(read, Flaw):
        return CheckpointState(path=str(path), damage=read.short, flaws=[read])
    content, manifest = read
    flaws = _manifest_flaws(path, manifest) or [
        flaw
        for file in manifest.files
        if (flaw := inspect_file(path, file, with_hash=with_hashes, follow_links=follow_links))
    ]
    return CheckpointState(
        path=str(path),
        damage=flaws[0].short if flaws else "",
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        attempt_id=manifest.attempt_id,
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        total_bytes=manifest.total_bytes,
        created_unix_s=manifest.created_unix_s,
        manifest_sha256=hashlib.sha256(content).hexdigest(),
        manifest=manifest,
        flaws=flaws,
    )


def verify_checkpoint(path: Path) -> CheckpointState:
    """Whether a checkpoint is whole by every hash; nothing is hashed where a size is wrong.

    Hashing takes minutes, and a disk that was full leaves files that are too short.
    """
    state = inspect_checkpoint(path, with_hashes=False)
    return state if state.damage else inspect_checkpoint(path)


def inspect_file(
    folder: Path, file: FileEntry, *, with_hash: bool, follow_links: bool
) -> Flaw | None:
    """What of a recorded file is not as recorded; None if nothing is."""
    path, recorded = folder / file.name, f"{file.size} bytes"
    fault = None if follow_links else path_fault(folder, file.name)
    if fault is not None:
        return Flaw(path, recorded, fault)
    try:
        size = path.stat().st_size
        if size != file.size:
            return Flaw(path, recorded, f"{size} bytes")
        sha256 = hash_file(path) if with_hash else file.sha256
    except (FileNotFoundError, NotADirectoryError):
        return Flaw(path, recorded, "missing")
    except OSError as error:  # a folder in its place, or a disk that gives a part of it no more
        return Flaw(path, recorded, f"unreadable: {error.strerror}")
    if sha256 != file.sha256:
        return Flaw(path, f"sha256 {file.sha256}", f"sha256 {sha256}")
    return None


def _read_manifest(path: Path, *, follow_links: bool) -> tuple[bytes, CheckpointManifest] | Flaw:
    """checkpoint.json as bytes and parsed, or why it cannot be used."""
    name = f"{path.name}/{MANIFEST_NAME}"
    found = None if follow_links else path_fault(path.parent, name)
    try:
        if found is None:
            content = read_bounded(path / MANIFEST_NAME, MANIFEST.max_bytes)
            return content, parse_manifest(content)
    except (FileNotFoundError, NotADirectoryError):
        found = "missing"
    except OSError as error:
        found = f"unreadable: {error.strerror}"
    except ValueError as error:
        found = f"unreadable: {one_line(error)}"
    return Flaw(path / MANIFEST_NAME, "the checkpoint's manifest", found)


def _missing_manifest(path: Path) -> Flaw:
    return Flaw(path / MANIFEST_NAME, "the checkpoint's manifest", "missing")


def _manifest_flaws(path: Path, manifest: CheckpointManifest) -> list[Flaw]:
    """Why a manifest must not be followed."""
    place, named = path / MANIFEST_NAME, CHECKPOINT_NAME.fullmatch(path.name)
    if manifest.fault is not None:
        return [Flaw(place, "a list of the folder's own files", f"one that {manifest.fault}")]
    if named and int(named[1]) != manifest.step:
        return [Flaw(place, f"of step {int(named[1])}", f"of step {show_number(manifest.step)}")]
    return []


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None without a readable manifest: then it is not whole."""
    read = _read_manifest(path, follow_links=True)
    return None if isinstance(read, Flaw) else Checkpoint(path, read[1])


def parse_manifest(content: bytes) -> CheckpointManifest:
    """A manifest from the bytes of its file; `fault` says whether its files may be followed.

    Raises:
        ValueError: If it is over a limit, or no manifest.
    """
    return parse_model(CheckpointManifest, content, MANIFEST)


def read_known_good_name(run: RunDir) -> str:
    """Name of the last known good checkpoint; empty if there is none yet.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it holds no text, or too much.
    """
    try:
        return read_bounded(run.known_good, _MAX_NAME_BYTES).decode().strip()
    except FileNotFoundError:
        return ""


def list_checkpoint_folders(run: RunDir) -> list[Path]:
    """All folders under checkpoints/ that are named as one, highest step first, whole or not.

    Raises:
        OSError: If checkpoints/ cannot be read.
    """
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
    found = [one for one in map(read_checkpoint, list_checkpoint_folders(run)) if one is not None]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def plan_removal(
    steps: Sequence[int], *, keep_last: int, keep_every: int, protected: Collection[int] = ()
) -> list[int]:
    """Steps of the checkpoints that may go, newest first; pure.

    Args:
        steps: Steps of all whole checkpoints, in any order.
        keep_last: Newest ones that are kept.
        keep_every: Every one at a multiple of this step is kept for good; 0 for none.
        protected: Steps that are kept whatever else holds.
    """
    ordered = sorted(steps, reverse=True)
    return [
        step
        for step in ordered[keep_last:]
        if step not in protected and not (keep_every and step % keep_every == 0)
    ]
