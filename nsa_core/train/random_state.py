"""The random generators of a rank: seeded, read, put back, and gathered from all ranks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa_core.config.base import FrozenModel
from nsa_core.train.group import RankGroup

#: Between the seeds of two ranks; a prime, so that runs with neighbouring seeds share none.
_RANK_STRIDE = 1_000_003


class HostRandomState(FrozenModel):
    """State of Python's and numpy's global generators."""

    python_version: int
    python_words: list[int]
    python_gauss: float | None
    numpy_words: list[int]
    numpy_position: int
    numpy_has_gauss: int
    numpy_gauss: float


@dataclass(frozen=True)
class RandomState:
    """All generators of one rank; the tensors are those of torch, by device type, on the host."""

    words: HostRandomState
    tensors: dict[str, Tensor]


class _Gathered(FrozenModel):
    """A `RandomState` as it goes from rank to rank; tensors of bytes in hex."""

    words: HostRandomState
    tensors: dict[str, str]


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, numpy and torch on every device; another rank of a run has other numbers."""
    seed += rank * _RANK_STRIDE
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_random_state(device: torch.device) -> RandomState:
    """The generators as they are now: of torch `cpu`, and `cuda` on a card."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device).cpu()
    return RandomState(_read_host_state(), tensors)


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Put all generators back; a state of a device that is not here is ignored."""
    _restore_host_state(state.words)
    torch.set_rng_state(state.tensors["cpu"])
    if device.type == "cuda" and "cuda" in state.tensors:
        torch.cuda.set_rng_state(state.tensors["cuda"], device)


def gather_random(group: RankGroup, own: RandomState) -> tuple[RandomState, ...]:
    """The generators of all ranks, by rank."""
    if group.size == 1:
        return (own,)
    return tuple(_parse(found) for found in group.gather(_format(own)))


def spread_random(group: RankGroup, states: Sequence[RandomState]) -> RandomState | None:
    """The generators of this rank among those that rank 0 has read; None where it has fewer."""
    text = b"\n".join(_format(state) for state in states)
    found = group.from_first(text).splitlines()
    rank = group.place.rank
    return _parse(found[rank]) if rank < len(found) else None


def _format(state: RandomState) -> bytes:
    tensors = {name: found.numpy().tobytes().hex() for name, found in state.tensors.items()}
    return _Gathered(words=state.words, tensors=tensors).model_dump_json().encode()


def _parse(content: bytes) -> RandomState:
    found = _Gathered.model_validate_json(content)
    tensors = {
        name: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        for name, state in found.tensors.items()
    }
    return RandomState(found.words, tensors)


def _read_host_state() -> HostRandomState:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = np.random.get_state(legacy=False)
    return HostRandomState(
        python_version=version,
        python_words=list(words),
        python_gauss=gauss,
        numpy_words=[int(word) for word in state["state"]["key"]],
        numpy_position=int(state["state"]["pos"]),
        numpy_has_gauss=int(state["has_gauss"]),
        numpy_gauss=float(state["gauss"]),
    )


def _restore_host_state(state: HostRandomState) -> None:
    random.setstate((state.python_version, tuple(state.python_words), state.python_gauss))
    words = np.array(state.numpy_words, dtype=np.uint32)
    np.random.set_state(
        ("MT19937", words, state.numpy_position, state.numpy_has_gauss, state.numpy_gauss)
    )
