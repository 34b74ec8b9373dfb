"""Checkpoint in shards: which rows of which tensor each rank wrote, and whether they are all there.

Rank r writes model_rank{r}.safetensors and optimizer_rank{r}.safetensors, and when those are on the
disk shard_rank{r}.json with their hashes. Rank 0 makes one checkpoint.json of all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from nsa_core.config.base import FrozenModel, TolerantModel
from nsa_core.rundir.bounded_json import MANIFEST, parse_model, read_bounded
from nsa_core.rundir.checkpoint import SHARD_FILE, CheckpointFile, CheckpointManifest, rank_file
from nsa_core.rundir.manifest import AttemptId
from nsa_core.rundir.names import show_number

#: Dimensions of a tensor at most, as in numpy.
_MAX_DIMENSIONS = 64


class TensorRows(FrozenModel):
    """Rows `begin` to `end` of dimension 0 of a tensor; of a scalar 0 to 1.

    Attributes:
        shape: Of the whole tensor.
    """

    begin: int = Field(ge=0)
    end: int
    shape: tuple[int, ...] = Field(max_length=_MAX_DIMENSIONS)

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if not self.begin <= self.end <= self.num_rows or min(self.shape, default=0) < 0:
            message = f"rows {self.begin} to {self.end} of a tensor of shape {list(self.shape)}"
            raise ValueError(message)
        return self

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """All rows of a tensor."""
        return cls(begin=0, end=shape[0] if shape else 1, shape=shape)

    @property
    def num_rows(self) -> int:
        """Rows of the whole tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        return (self.end - self.begin, *self.shape[1:]) if self.shape else ()


class CheckpointShard(TolerantModel):
    """Content of shard_rank{r}.json, written last of a rank's files.

    Attributes:
        model: Rows in its model_rank{r}.safetensors, by tensor; likewise `optimizer`.
        files: Its other files, with their hashes.
    """

    schema_version: int = 1
    rank: int = Field(ge=0)
    num_ranks: int = Field(ge=1)
    step: int
    attempt: int
    attempt_id: AttemptId = ""
    model: dict[str, TensorRows]
    optimizer: dict[str, TensorRows]
    files: list[CheckpointFile]


class ShardFailure(TolerantModel):
    """Content of failed_rank{r}.json: why a rank gave up, so that the others do not wait for it."""

    rank: int
    message: str
    is_disk_full: bool = False
    advice: str = ""


def failure_file(rank: int) -> str:
    """Name of the file in which a rank says that it gave up a save."""
    return rank_file("failed.json", rank)


def read_shard(folder: Path, rank: int) -> CheckpointShard:
    """What a rank wrote.

    Raises:
        OSError: If it cannot be read, or is not there.
        ValueError: If it is over a limit, or no such description.
    """
    content = read_bounded(folder / rank_file(SHARD_FILE, rank), MANIFEST.max_bytes)
    return parse_model(CheckpointShard, content, MANIFEST)


def read_shards(folder: Path, manifest: CheckpointManifest) -> list[CheckpointShard]:
    """What every rank wrote, complete and in order.

    Raises:
        OSError: If one cannot be read.
        ValueError: If one is not what its name says, or rows are missing or there twice.
    """
    shards = [read_shard(folder, rank) for rank in range(manifest.num_shards)]
    other = [shard for shard in shards if shard.step != manifest.step]
    if other:
        message = f"{rank_file(SHARD_FILE, other[0].rank)} is of step {show_number(other[0].step)}"
        raise ValueError(message)
    fault = find_shard_fault(shards)
    if fault is not None:
        raise ValueError(fault)
    return shards


def find_shard_fault(shards: Sequence[CheckpointShard]) -> str | None:
    """Why these descriptions, in the order of ranks, are not one whole state; None if they are."""
    for number, shard in enumerate(shards):
        if (shard.rank, shard.num_ranks) != (number, len(shards)):
            return (
                f"{rank_file(SHARD_FILE, number)} is of rank {show_number(shard.rank)} of "
                f"{show_number(shard.num_ranks)}, "
                f"and not of rank {number} of {len(shards)}"
            )
    return _find_gap([shard.model for shard in shards]) or _find_gap(
        [shard.optimizer for shard in shards]
    )


def _find_gap(parts: Sequence[Mapping[str, TensorRows]]) -> str | None:
    """The first tensor whose rows are not there exactly once."""
    names: Iterable[str] = dict.fromkeys(name for part in parts for name in part)
    for name in names:
        found = [part[name] for part in parts if name in part]
        shapes = {rows.shape for rows in found}
        if len(shapes) > 1:
            return f"tensor `{name}` has the shapes {sorted(map(list, shapes))} in its shards"
        at = 0
        for rows in sorted(found, key=lambda rows: (rows.begin, rows.end)):
            if rows.begin != at:
                what = "are missing" if rows.begin > at else "are there twice"
                between = sorted((at, rows.begin))
                return f"rows {between[0]} to {between[1]} of tensor `{name}` {what}"
            at = rows.end
        if at != found[0].num_rows:
            return f"rows {at} to {found[0].num_rows} of tensor `{name}` are missing"
    return None
