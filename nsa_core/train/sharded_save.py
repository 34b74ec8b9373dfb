"""How the ranks of a run write one checkpoint together, through files alone.

Every rank writes its part into one temporary folder, and a description with hashes last. Rank 0
waits for all descriptions, lists every file in checkpoint.json, and renames the folder. The other
ranks wait for that name. Nobody waits longer than the deadline, for a rank that said that it gave
up, or for one whose process is gone; then there is no checkpoint, and the one before is untouched.
No collective is used, because this runs in a thread beside the training.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError

from nsa_core.config.base import one_line
from nsa_core.rundir.atomic import fsync_file, write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.checkpoint import (
    SHARD_FILE,
    Checkpoint,
    CheckpointFile,
    rank_file,
    read_checkpoint,
)
from nsa_core.rundir.checkpoint_shards import (
    CheckpointShard,
    ShardFailure,
    failure_file,
    find_shard_fault,
    read_shard,
)
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import is_alive
from nsa_core.rundir.ranks import read_rank_process
from nsa_core.train.checkpoint_files import (
    TEMPORARY_PREFIX,
    CheckpointOrigin,
    CheckpointWriteError,
    ShardLayout,
    TrainingSnapshot,
    commit,
    describe_failure,
    describe_files,
    make_manifest,
    remove_folder,
    write_json,
    write_records,
    write_tensors,
)

_POLL_S = 0.02


@dataclass(frozen=True)
class SharedSave:
    """One save that all ranks take part in.

    Attributes:
        number: Saves of this attempt before it, the same on every rank: no two share a folder.
        deadline_s: Longest wait for another rank, once this one has written its own part.
        sleep: Takes seconds; waits between two looks.
    """

    number: int
    deadline_s: float
    sleep: Callable[[float], object] = time.sleep


def write_sharded(
    run: RunDir, snapshot: TrainingSnapshot, origin: CheckpointOrigin, save: SharedSave
) -> Checkpoint:
    """Write this rank's part, and return the checkpoint once rank 0 has made one of all parts.

    Raises:
        CheckpointWriteError: If the disk refuses, or another rank does not do its part in time.
    """
    layout = snapshot.layout
    if layout is None:
        message = "a snapshot of the whole state has no shards"
        raise ValueError(message)
    step = snapshot.state.step
    name = f"{TEMPORARY_PREFIX}{run.checkpoint(step).name}_attempt{origin.attempt}"
    folder = run.checkpoints / f"{name}_save{save.number}"
    try:
        if layout.rank == 0:
            _remove_earlier(run, folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = _write_part(folder, snapshot, layout, origin)
        wait = _Wait(run, folder, layout, origin, step, save)
        if layout.rank:
            return wait.for_checkpoint()
        shards = [wait.for_shard(rank) for rank in range(layout.num_ranks)]
        return _commit_all(run, folder, snapshot, origin, shards, files)
    except (OSError, SafetensorError) as error:
        failure = describe_failure(step, error)
        _give_up(folder, layout, failure)
        raise failure from error
    except CheckpointWriteError as error:
        _give_up(folder, layout, error)
        raise


def _remove_earlier(run: RunDir, folder: Path) -> None:
    """Remove what earlier saves that failed have left; only one save is under way at a time."""
    for found in run.checkpoints.glob(f"{TEMPORARY_PREFIX}step_*"):
        if found != folder:
            remove_folder(found)


def _write_part(
    folder: Path, snapshot: TrainingSnapshot, layout: ShardLayout, origin: CheckpointOrigin
) -> list[CheckpointFile]:
    """Write this rank's files, then their description; rank 0 gets the records of all ranks."""
    own = describe_files(write_tensors(folder, snapshot))
    shard = CheckpointShard(
        rank=layout.rank,
        num_ranks=layout.num_ranks,
        step=snapshot.state.step,
        attempt=origin.attempt,
        attempt_id=origin.attempt_id,
        model=layout.model,
        optimizer=layout.optimizer,
        files=own,
    )
    records = [] if layout.rank else describe_files(write_records(folder, snapshot))
    offered = folder / rank_file(SHARD_FILE, layout.rank)
    hidden = offered.with_name(f".{offered.name}")
    write_json(hidden, shard)
    fsync_file(hidden)
    hidden.rename(offered)  # rank 0 may name the checkpoint from here on, and syncs its folder
    return records


def _commit_all(
    run: RunDir,
    folder: Path,
    snapshot: TrainingSnapshot,
    origin: CheckpointOrigin,
    shards: list[CheckpointShard],
    records: list[CheckpointFile],
) -> Checkpoint:
    """One manifest of the files of all ranks, whose hashes they computed themselves."""
    fault = find_shard_fault(shards)
    if fault is not None:
        message = f"checkpoint of step {snapshot.state.step} would not be whole: {fault}"
        raise CheckpointWriteError(message, is_disk_full=False)
    described = describe_files([folder / rank_file(SHARD_FILE, shard.rank) for shard in shards])
    files = [*records, *described, *(file for shard in shards for file in shard.files)]
    for file in files:
        size = (folder / file.name).stat().st_size
        if size != file.size:
            message = f"{file.name} has {size} bytes, and its rank wrote {file.size}"
            raise CheckpointWriteError(message, is_disk_full=False)
    files.sort(key=lambda file: file.name)
    return commit(run, folder, make_manifest(snapshot, origin, files))


def _give_up(folder: Path, layout: ShardLayout, error: CheckpointWriteError) -> None:
    """Say to the other ranks why there will be no checkpoint, and free the space.

    A part that was offered stays until rank 0 removes it, which may be naming the checkpoint now.
    """
    if layout.rank and (folder / rank_file(SHARD_FILE, layout.rank)).exists():
        return
    ending = f"_rank{layout.rank}"
    failure = ShardFailure(
        rank=layout.rank,
        message=str(error),
        is_disk_full=error.is_disk_full,
        advice=error.advice,
    )
    try:
        for path in folder.iterdir():
            if layout.rank == 0 or path.stem.endswith(ending):
                path.unlink(missing_ok=True)
        write_text(folder / failure_file(layout.rank), failure.model_dump_json() + "\n")
    except OSError:  # a disk that takes not even this: without the folder nobody waits for it
        if layout.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


class _Wait:
    """Waits of one rank for the others in one save."""

    def __init__(
        self,
        run: RunDir,
        folder: Path,
        layout: ShardLayout,
        origin: CheckpointOrigin,
        step: int,
        save: SharedSave,
    ) -> None:
        self._run = run
        self._folder = folder
        self._layout = layout
        self._origin = origin
        self._step = step
        self._save = save
        self._until = time.monotonic() + save.deadline_s

    def for_shard(self, rank: int) -> CheckpointShard:
        """The description of a rank, once it is there."""
        name = rank_file(SHARD_FILE, rank)
        while not (self._folder / name).exists():
            self._look(rank)
        try:
            shard = read_shard(self._folder, rank)
        except ValueError as error:
            self._fail(f"{name} of rank {rank} is damaged: {one_line(error)}", error)
        expected = (self._step, self._origin.attempt, self._origin.attempt_id)
        if (shard.step, shard.attempt, shard.attempt_id) != expected:
            self._fail(f"{name} of rank {rank} is of another save")
        return shard

    def for_checkpoint(self) -> Checkpoint:
        """The checkpoint that rank 0 has made of all parts."""
        final = self._run.checkpoint(self._step)
        self._until += self._save.deadline_s  # rank 0 decides first, for all
        while self._folder.exists():
            self._look(0)
        made = read_checkpoint(final)
        if made is None or made.manifest.attempt_id != self._origin.attempt_id:
            self._fail("rank 0 removed the parts")
        return made

    def _look(self, rank: int) -> None:
        """Wait a little for a rank; raise if it will not come."""
        for other in range(self._layout.num_ranks):
            path = self._folder / failure_file(other)
            if other != self._layout.rank and path.exists():
                raise _failure_of(path, other)
        process = read_rank_process(self._run, rank, self._origin.attempt)
        if process is not None and not is_alive(process.process):
            self._fail(f"the process of rank {rank} is gone")
        if time.monotonic() > self._until:
            self._fail(f"rank {rank} did not do its part within {self._save.deadline_s:g} s")
        self._save.sleep(_POLL_S)

    def _fail(self, why: str, cause: Exception | None = None) -> NoReturn:
        message = f"checkpoint of step {self._step} could not be written: {why}"
        raise CheckpointWriteError(
            message, is_disk_full=False, advice="Look at the ranks with `nsa-ops status`"
        ) from cause


def _failure_of(path: Path, rank: int) -> CheckpointWriteError:
    """What another rank gave up for."""
    try:
        found = read_model(ShardFailure, path)
    except (OSError, ValueError) as error:
        message = f"rank {rank} gave up its part: {one_line(error)}"
        return CheckpointWriteError(message, is_disk_full=False)
    message = f"rank {rank} gave up its part: {found.message}"
    return CheckpointWriteError(message, is_disk_full=found.is_disk_full, advice=found.advice)
