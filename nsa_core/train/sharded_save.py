"""How the ranks of a run write one checkpoint together, through files alone.

Every rank writes its part into one temporary folder, and a description with hashes last. Rank 0
waits for all descriptions, lists every file in checkpoint.json, and renames the folder. The other
ranks wait for that name. Nobody waits longer than the deadline, for a rank that said that it gave
up, or for one whose process is gone; then there is no checkpoint, and the one before is untouched.
No collective is used, because this runs in a thread beside the training.
"""

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError

from nsa_core.config.base import one_line
from nsa_core.rundir.atomic import fsync_file, write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.checkpoint import SHARD_FILE, Checkpoint, rank_file, read_checkpoint
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
        number: Which one of this attempt it is, the same on every rank: no two share a folder.
        deadline_s: Longest wait for another rank, once this one has written its own part.
    """

    number: int
    deadline_s: float


def write_sharded(
    run: RunDir, snapshot: TrainingSnapshot, origin: CheckpointOrigin, save: SharedSave
) -> Checkpoint:
    """Write this rank's part, and return the checkpoint once rank 0 has made one of all parts.

    Raises:
        CheckpointWriteError: If the disk refuses, or another rank does not do its part in time.
    """
    if snapshot.layout is None:
        message = "a snapshot of the whole state has no shards"
        raise ValueError(message)
    return _Part(run, snapshot, snapshot.layout, origin, save).write()


class _Part:
    """The part of one rank in a save, and its waits for the others."""

    def __init__(
        self,
        run: RunDir,
        snapshot: TrainingSnapshot,
        layout: ShardLayout,
        origin: CheckpointOrigin,
        save: SharedSave,
    ) -> None:
        self._run = run
        self._snapshot = snapshot
        self._layout = layout
        self._origin = origin
        self._save = save
        self._step = snapshot.state.step
        self._final = run.checkpoint(self._step)
        name = f"{TEMPORARY_PREFIX}{self._final.name}_attempt{origin.attempt}_save{save.number}"
        self._folder = run.checkpoints / name
        self._until = math.inf

    def write(self) -> Checkpoint:
        """Write it; errors as of `write_sharded`."""
        try:
            if self._layout.rank == 0:
                self._remove_earlier()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_files()
            self._until = time.monotonic() + self._save.deadline_s
            return self._wait_for_checkpoint() if self._layout.rank else self._commit()
        except (OSError, SafetensorError) as error:
            failure = describe_failure(self._step, error)
            self._give_up(failure)
            raise failure from error
        except CheckpointWriteError as error:
            self._give_up(error)
            raise

    def _remove_earlier(self) -> None:
        """Remove what earlier saves that failed have left; only one save is under way at a time."""
        for found in self._run.checkpoints.glob(f"{TEMPORARY_PREFIX}step_*"):
            if found != self._folder:
                remove_folder(found)

    def _write_files(self) -> None:
        """Write this rank's files, then their description, which offers them to rank 0."""
        layout, offered = self._layout, self._description(self._layout.rank)
        shard = CheckpointShard(
            rank=layout.rank,
            num_ranks=layout.num_ranks,
            step=self._step,
            attempt=self._origin.attempt,
            attempt_id=self._origin.attempt_id,
            model=layout.model,
            optimizer=layout.optimizer,
            files=describe_files(write_tensors(self._folder, self._snapshot)),
        )
        hidden = offered.with_name(f".{offered.name}")
        write_json(hidden, shard)
        fsync_file(hidden)
        hidden.rename(offered)  # rank 0 may name the checkpoint from here on, and syncs its folder

    def _description(self, rank: int) -> Path:
        return self._folder / rank_file(SHARD_FILE, rank)

    def _commit(self) -> Checkpoint:
        """One manifest of the files of all ranks, whose hashes they computed themselves."""
        layout, folder = self._layout, self._folder
        records = describe_files(write_records(folder, self._snapshot))
        shards = [self._wait_for_shard(rank) for rank in range(layout.num_ranks)]
        fault = find_shard_fault(shards)
        if fault is not None:
            message = f"checkpoint of step {self._step} would not be whole: {fault}"
            raise CheckpointWriteError(message, is_disk_full=False)
        described = describe_files([self._description(shard.rank) for shard in shards])
        files = [*records, *described, *(file for shard in shards for file in shard.files)]
        for file in files:
            size = (folder / file.name).stat().st_size
            if size != file.size:
                message = f"{file.name} has {size} bytes, and its rank wrote {file.size}"
                raise CheckpointWriteError(message, is_disk_full=False)
        files.sort(key=lambda file: file.name)
        return commit(self._run, folder, make_manifest(self._snapshot, self._origin, files))

    def _give_up(self, error: CheckpointWriteError) -> None:
        """Say to the other ranks why there will be no checkpoint, and free the space.

        A part that was offered stays until rank 0 removes it, which may be naming the checkpoint.
        """
        rank = self._layout.rank
        if rank and self._description(rank).exists():
            return
        failure = ShardFailure(
            rank=rank,
            message=str(error),
            is_disk_full=error.is_disk_full,
            advice=error.advice,
        )
        try:
            for path in self._folder.iterdir():
                if rank == 0 or path.stem.endswith(f"_rank{rank}"):
                    path.unlink(missing_ok=True)
            write_text(self._folder / failure_file(rank), failure.model_dump_json() + "\n")
        except OSError:  # a disk that takes not even this: without the folder nobody waits for it
            if rank == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_shard(self, rank: int) -> CheckpointShard:
        """The description of a rank, once it is there."""
        path = self._description(rank)
        while not path.exists():
            self._look(rank)
        try:
            shard = read_shard(self._folder, rank)
        except ValueError as error:
            self._fail(f"{path.name} of rank {rank} is damaged: {one_line(error)}", error)
        expected = (self._step, self._origin.attempt, self._origin.attempt_id)
        if (shard.step, shard.attempt, shard.attempt_id) != expected:
            self._fail(f"{path.name} of rank {rank} is of another save")
        return shard

    def _wait_for_checkpoint(self) -> Checkpoint:
        """The checkpoint that rank 0 has made of all parts."""
        self._until += self._save.deadline_s  # rank 0 decides first, for all
        while self._folder.exists():
            self._look(0)
        made = read_checkpoint(self._final)
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
        time.sleep(_POLL_S)

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
