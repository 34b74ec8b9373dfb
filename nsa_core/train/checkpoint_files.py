"""What a checkpoint holds, without pickles, and how its folder is written whole or not at all."""

import errno
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nsa_core.config.base import FrozenModel, disk_advice
from nsa_core.config.run import RunConfig
from nsa_core.rundir.atomic import fsync_dir, fsync_file, write_text
from nsa_core.rundir.checkpoint import (
    CONFIG_FILE,
    MANIFEST_NAME,
    MODEL_FILE,
    OPTIMIZER_FILE,
    Checkpoint,
    CheckpointFile,
    CheckpointManifest,
    hash_file,
    rank_file,
)
from nsa_core.rundir.checkpoint_shards import TensorRows
from nsa_core.rundir.layout import RunDir
from nsa_core.train.random_state import HostRandomState, RandomState

STATE_FILE = "state.json"
TEMPORARY_PREFIX = ".writing_"
#: Generators of a rank: those of torch, and those of Python and numpy.
RANDOM_TENSORS, RANDOM_WORDS = "random.safetensors", "random.json"


class TrainingState(FrozenModel):
    """Content of state.json: how far the run is, apart from tensors.

    Attributes:
        tokens_seen: Tokens consumed by all ranks.
        loader: The data cursor, as the loader gave it.
        loss_scaler: State of the fp16 gradient scaler; None without one.
        unusable_steps: Recent steps that were skipped, for the rule "3 in 100".
        step_seconds: Seconds of training behind this state, which a rollback to an older one loses.
    """

    step: int
    tokens_seen: int
    loader: dict[str, Any]
    loss_scaler: dict[str, int | float] | None = None
    unusable_steps: list[int] = []
    step_seconds: float = 0.0


@dataclass(frozen=True)
class ShardLayout:
    """Which rows of which tensor a rank keeps, where each keeps a part of the state.

    A tensor that another rank alone keeps, such as a counter, is not named.
    """

    rank: int
    num_ranks: int
    model: dict[str, TensorRows]
    optimizer: dict[str, TensorRows]


@dataclass(frozen=True)
class TrainingSnapshot:
    """A consistent copy of everything a checkpoint holds, which training does not change.

    Attributes:
        random: Generators that this rank writes, by rank: of all where the state is whole.
        layout: What `model` and `optimizer` are a part of; None where they are whole.
    """

    state: TrainingState
    config: RunConfig
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: Mapping[int, RandomState]
    layout: ShardLayout | None = None

    @property
    def rank(self) -> int:
        """The rank that writes it."""
        return self.layout.rank if self.layout is not None else 0


@dataclass(frozen=True)
class CheckpointOrigin:
    """Who writes a checkpoint; goes into its manifest."""

    run_id: str
    attempt: int
    config_sha256: str
    tokenizer_fingerprint: str
    attempt_id: str = ""


class CheckpointWriteError(Exception):
    """A checkpoint could not be written; what was there before is untouched.

    Attributes:
        is_disk_full: The disk or the quota has no room.
        advice: What to do about it, as the beginning of a hint.
    """

    def __init__(
        self, message: str, *, is_disk_full: bool, advice: str = "Look at the disk"
    ) -> None:
        super().__init__(message)
        self.is_disk_full = is_disk_full
        self.advice = advice


def to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory that later updates do not touch."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def is_disk_full(error: OSError | SafetensorError) -> bool:
    """Whether a write failed for lack of room."""
    return _as_os_error(error).errno in {errno.ENOSPC, errno.EDQUOT}


def advise(error: OSError | SafetensorError) -> str:
    """What to do about a write that failed, as the beginning of a hint."""
    return disk_advice(_as_os_error(error))


def _as_os_error(error: OSError | SafetensorError) -> OSError:
    """The error of the system; safetensors hides its number in its text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)\)", str(error))
    return OSError(int(number[1]) if number else 0, str(error))


def write_checkpoint(
    run: RunDir, snapshot: TrainingSnapshot, origin: CheckpointOrigin
) -> Checkpoint:
    """Write a folder beside its final name, fsync it, and rename it.

    Raises:
        CheckpointWriteError: If the disk refuses; the temporary folder is gone then.
    """
    final = run.checkpoint(snapshot.state.step)
    temporary = run.checkpoints / f"{TEMPORARY_PREFIX}{final.name}"
    try:
        run.checkpoints.mkdir(exist_ok=True)
        remove_folder(temporary)
        temporary.mkdir()
        write_tensors(temporary, snapshot)
        write_records(temporary, snapshot)
        files = describe_files(sorted(temporary.iterdir()))
        return commit(run, temporary, make_manifest(snapshot, origin, files))
    except (OSError, SafetensorError) as error:
        remove_folder(temporary)
        raise describe_failure(snapshot.state.step, error) from error


def describe_failure(step: int, error: OSError | SafetensorError) -> CheckpointWriteError:
    """What to raise for a write that a disk refused."""
    message = f"checkpoint of step {step} could not be written: {error}"
    return CheckpointWriteError(message, is_disk_full=is_disk_full(error), advice=advise(error))


def remove_folder(folder: Path) -> None:
    """Remove a folder that holds no whole checkpoint; nothing if there is none."""
    if folder.exists():
        shutil.rmtree(folder)


def write_tensors(folder: Path, snapshot: TrainingSnapshot) -> list[Path]:
    """Write one rank's weights, optimizer state and generators durably; returns the files."""
    model, optimizer = folder / MODEL_FILE, folder / OPTIMIZER_FILE
    if snapshot.layout is not None:
        model, optimizer = (
            path.with_name(rank_file(path.name, snapshot.rank)) for path in (model, optimizer)
        )
    save_file(snapshot.model, model)
    save_file(snapshot.optimizer, optimizer)
    paths = [model, optimizer]
    for rank, random in snapshot.random.items():
        tensors, words = (folder / rank_file(name, rank) for name in (RANDOM_TENSORS, RANDOM_WORDS))
        save_file(random.tensors, tensors)
        write_json(words, random.words)
        paths += [tensors, words]
    for path in paths:
        path.chmod(0o644)  # safetensors makes files that only their owner reads
        fsync_file(path)
    return paths


def write_records(folder: Path, snapshot: TrainingSnapshot) -> list[Path]:
    """Write what is the same on every rank durably; returns the files."""
    state, config = folder / STATE_FILE, folder / CONFIG_FILE
    write_json(state, snapshot.state)
    write_json(config, snapshot.config)
    for path in (state, config):
        fsync_file(path)
    return [state, config]


def write_json(path: Path, record: BaseModel) -> None:
    """Write a record as one line."""
    path.write_text(record.model_dump_json() + "\n", encoding="utf-8")
    path.chmod(0o644)


def describe_files(paths: Sequence[Path]) -> list[CheckpointFile]:
    """Names, sizes and hashes of files."""
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter lock, and TERM has 25 s
        hashes = list(pool.map(hash_file, paths))
    return [
        CheckpointFile(name=path.name, size=path.stat().st_size, sha256=sha256)
        for path, sha256 in zip(paths, hashes, strict=True)
    ]


def make_manifest(
    snapshot: TrainingSnapshot, origin: CheckpointOrigin, files: list[CheckpointFile]
) -> CheckpointManifest:
    """What checkpoint.json will say."""
    return CheckpointManifest(
        run_id=origin.run_id,
        attempt=origin.attempt,
        attempt_id=origin.attempt_id,
        step=snapshot.state.step,
        tokens_seen=snapshot.state.tokens_seen,
        created_unix_s=time.time(),
        config_sha256=origin.config_sha256,
        tokenizer_fingerprint=origin.tokenizer_fingerprint,
        num_shards=snapshot.layout.num_ranks if snapshot.layout is not None else 0,
        files=files,
    )


def commit(run: RunDir, temporary: Path, manifest: CheckpointManifest) -> Checkpoint:
    """Put the manifest into a folder of durable files, and give that its name."""
    final = run.checkpoint(manifest.step)
    write_text(temporary / MANIFEST_NAME, manifest.model_dump_json(indent=2) + "\n")
    temporary.rename(final)
    fsync_dir(run.checkpoints)
    return Checkpoint(final, manifest)


def name_latest(run: RunDir, final: Path) -> None:
    """Replace `latest`; the checkpoint that it names is whole without it."""
    write_text(run.latest, final.name + "\n")


def remove_leftovers(run: RunDir) -> list[tuple[str, str]]:
    """Remove what was left half written: the name of each, and why it stays (or nothing)."""
    names = (f"{TEMPORARY_PREFIX}*", f".{run.latest.name}.*", f".{run.known_good.name}.*")
    leftovers = sorted(path for name in names for path in run.checkpoints.glob(name))
    return [(path.name, _remove_leftover(path)) for path in leftovers]


def _remove_leftover(path: Path) -> str:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return f" and cannot be removed: {error.strerror}"
    return ""


def read_state(folder: Path) -> TrainingState:
    """state.json of a checkpoint; ValueError if it holds no training state."""
    return TrainingState.model_validate_json((folder / STATE_FILE).read_bytes())


def read_config(folder: Path) -> RunConfig:
    """The configuration that a checkpoint was trained with; ValueError if it is none."""
    return RunConfig.model_validate_json((folder / CONFIG_FILE).read_bytes())


def read_random(folder: Path, manifest: CheckpointManifest) -> list[RandomState]:
    """The generators of every rank that wrote it; ValueError if a file does not hold them."""
    listed = {file.name for file in manifest.files}
    found: list[RandomState] = []
    while (name := rank_file(RANDOM_WORDS, len(found))) in listed:
        words = HostRandomState.model_validate_json((folder / name).read_bytes())
        tensors = load_file(folder / rank_file(RANDOM_TENSORS, len(found)))
        found.append(RandomState(words, tensors))
    if not found:
        message = f"it does not list {name}"
        raise ValueError(message)
    return found
