"""Every random generator that training may draw from, as plain data: nothing is pickled."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa_core.config.base import FrozenModel


class HostRandomState(FrozenModel):
    """State of Python's and numpy's global generators."""

    python_version: int
    python_words: list[int]
    python_gauss: float | None
    numpy_words: list[int]
    numpy_position: int
    numpy_has_gauss: int
    numpy_gauss: float


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_host_state() -> HostRandomState:
    """State of the generators that live in Python."""
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


def restore_host_state(state: HostRandomState) -> None:
    """Put Python's and numpy's generators back."""
    random.setstate((state.python_version, tuple(state.python_words), state.python_gauss))
    words = np.array(state.numpy_words, dtype=np.uint32)
    np.random.set_state(
        ("MT19937", words, state.numpy_position, state.numpy_has_gauss, state.numpy_gauss)
    )


def read_torch_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's generators: `cpu`, and `cuda` on a card."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_torch_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Put torch's generators back; a state of a device that is not here is passed over."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
