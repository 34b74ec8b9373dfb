"""Parts of a snapshot as ranks keep them, and their common save in threads of one process."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from nsa_core.rundir.checkpoint import Checkpoint
from nsa_core.rundir.checkpoint_shards import TensorRows
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint_files import (
    CheckpointOrigin,
    CheckpointWriteError,
    ShardLayout,
    TrainingSnapshot,
    name_latest,
)
from nsa_core.train.sharded_save import SharedSave, write_sharded


def rows_of(tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> dict[str, TensorRows]:
    """Rows of each tensor as `torch.chunk` divides them: later ranks may have fewer, or none."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            if rank == 0:
                found[name] = TensorRows(begin=0, end=1, shape=())
            continue
        num_rows = tensor.shape[0]
        size = -(-num_rows // num_ranks)
        begin, end = (min(num_rows, size * place) for place in (rank, rank + 1))
        found[name] = TensorRows(begin=begin, end=end, shape=tuple(tensor.shape))
    return found


def part_of(tensors: Mapping[str, Tensor], rows: Mapping[str, TensorRows]) -> dict[str, Tensor]:
    """The rows of each tensor."""
    return {
        name: tensors[name][one.begin : one.end].clone() if one.shape else tensors[name]
        for name, one in rows.items()
    }


def part(snapshot: TrainingSnapshot, rank: int, num_ranks: int) -> TrainingSnapshot:
    """What one of several ranks keeps of a whole state."""
    layout = ShardLayout(
        rank,
        num_ranks,
        rows_of(snapshot.model, rank, num_ranks),
        rows_of(snapshot.optimizer, rank, num_ranks),
    )
    return replace(
        snapshot,
        model=part_of(snapshot.model, layout.model),
        optimizer=part_of(snapshot.optimizer, layout.optimizer),
        random={rank: next(iter(snapshot.random.values()))},
        layout=layout,
    )


def save_together(
    run: RunDir,
    snapshots: Sequence[TrainingSnapshot],
    origin: CheckpointOrigin,
    save: SharedSave,
) -> list[Checkpoint | CheckpointWriteError]:
    """What each rank gets from a common save; a rank that is not among the snapshots stays away."""

    def write(snapshot: TrainingSnapshot) -> Checkpoint | CheckpointWriteError:
        try:
            made = write_sharded(run, snapshot, origin, save)
            if snapshot.rank == 0:
                name_latest(run, made.path)
            return made
        except CheckpointWriteError as error:
            return error

    with ThreadPoolExecutor(len(snapshots)) as pool:
        return list(pool.map(write, snapshots))
