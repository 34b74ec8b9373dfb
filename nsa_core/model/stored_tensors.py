"""Tensors of a checkpoint, whole or some rows, from one file or from the shards of any ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nsa_core.rundir.checkpoint import MODEL_FILE, CheckpointManifest, rank_file, read_checkpoint
from nsa_core.rundir.checkpoint_shards import TensorRows, read_shards


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is.

    Attributes:
        shape: Of the whole tensor.
        pieces: Files that hold rows of it, with those rows; together they are all rows once.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[Path, TensorRows], ...]


def find_stored(folder: Path, manifest: CheckpointManifest, name: str) -> dict[str, StoredTensor]:
    """All tensors of `model.safetensors` or `optimizer.safetensors`, or of their shards.

    Raises:
        OSError: If a file cannot be read; safetensors.SafetensorError likewise.
        ValueError: If the shards are not one whole state.
    """
    if not manifest.num_shards:
        return find_in_file(folder / name)
    found: dict[str, list[tuple[Path, TensorRows]]] = {}
    for shard in read_shards(folder, manifest):
        rows_by_name = shard.model if name == MODEL_FILE else shard.optimizer
        for tensor, rows in rows_by_name.items():
            found.setdefault(tensor, []).append((folder / rank_file(name, shard.rank), rows))
    return {
        tensor: StoredTensor(pieces[0][1].shape, tuple(pieces)) for tensor, pieces in found.items()
    }


def find_in_file(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one file, each whole."""
    found = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dictionary: it cannot be iterated
            shape = tuple(file.get_slice(name).get_shape())
            found[name] = StoredTensor(shape, ((path, TensorRows.whole(shape)),))
    return found


def read_stored(
    stored: Mapping[str, StoredTensor], wanted: Mapping[str, TensorRows] | None = None
) -> dict[str, Tensor]:
    """Tensors in host memory; only files that hold something of them are opened.

    Args:
        stored: Which ones, and where they are.
        wanted: Rows by name; a tensor that is not named is read whole.

    Raises:
        ValueError: If a tensor has another shape than the one wanted or described.
    """
    rows_by_name = {name: _rows_wanted(name, one, wanted) for name, one in stored.items()}
    by_file: dict[Path, list[tuple[str, TensorRows]]] = {}
    for name, one in stored.items():
        _check_size(name, one, rows_by_name[name])
        for path, have in one.pieces:
            if _has_some(have, rows_by_name[name]):
                by_file.setdefault(path, []).append((name, have))
    tensors: dict[str, Tensor] = {}
    for path, pieces in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name, have in pieces:
                _copy_rows(file, name, have, rows_by_name[name], tensors)
    return tensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file, or in the folder of a checkpoint that was verified.

    Raises:
        ValueError: As `find_stored`.
    """
    if not path.is_dir():
        return read_stored(find_in_file(path))
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        message = f"{path.name} has no readable manifest"
        raise ValueError(message)
    return read_stored(find_stored(path, checkpoint.manifest, MODEL_FILE))


def _rows_wanted(
    name: str, stored: StoredTensor, wanted: Mapping[str, TensorRows] | None
) -> TensorRows:
    rows = (wanted or {}).get(name) or TensorRows.whole(stored.shape)
    if rows.shape != stored.shape:
        message = (
            f"tensor `{name}` has shape {list(stored.shape)} in the checkpoint "
            f"and {list(rows.shape)} in the model"
        )
        raise ValueError(message)
    return rows


def _check_size(name: str, stored: StoredTensor, wanted: TensorRows) -> None:
    """Refuse a shape that its files cannot hold, before memory is taken for it."""
    elements = math.prod(wanted.part_shape)
    size = sum(path.stat().st_size for path in {path for path, _ in stored.pieces})
    if elements > size:
        message = f"tensor `{name}` has {elements} elements, and its files have {size} bytes"
        raise ValueError(message)


def _has_some(have: TensorRows, wanted: TensorRows) -> bool:
    """Whether a piece has rows that are wanted; of no rows, any piece tells the type."""
    if wanted.begin == wanted.end:
        return have.begin == 0
    return max(have.begin, wanted.begin) < min(have.end, wanted.end)


def _copy_rows(
    file: Any, name: str, have: TensorRows, wanted: TensorRows, tensors: dict[str, Tensor]
) -> None:
    """Copy what one opened file has of the rows of a tensor that are wanted."""
    piece = file.get_slice(name)
    if tuple(piece.get_shape()) != have.part_shape:
        message = (
            f"tensor `{name}` has shape {piece.get_shape()} in its file, which should hold "
            f"{list(have.part_shape)}"
        )
        raise ValueError(message)
    if have == wanted:
        tensors[name] = file.get_tensor(name)
        return
    begin, end = max(have.begin, wanted.begin), min(have.end, wanted.end)
    found = piece[begin - have.begin : max(begin, end) - have.begin]
    if name not in tensors:
        tensors[name] = torch.empty(wanted.part_shape, dtype=found.dtype)
    if tensors[name].dtype != found.dtype:
        message = (
            f"tensor `{name}` is {tensors[name].dtype} in one file and {found.dtype} in another"
        )
        raise ValueError(message)
    if begin < end:
        tensors[name][begin - wanted.begin : end - wanted.begin] = found
