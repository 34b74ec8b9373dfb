"""The ways to compute the selected branch on a device, each forced at every length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nsa_core.kernels.backend import AttentionBackend, DeviceFacts
from nsa_core.kernels.dispatch import refusal
from nsa_core.kernels.gathered_backend import GatheredBackend

_EVERY_LENGTH, _NO_LENGTH = 1 << 30, 0


@dataclass(frozen=True)
class SelectionPath:
    """One way.

    Attributes:
        backend: Whose it is.
        meaning: What it does, in one line.
        make: Makes the backend that takes this way at every length.
    """

    backend: str
    meaning: str
    make: Callable[[], AttentionBackend]


def _triton(dense_until: int) -> AttentionBackend:
    from nsa_core.kernels.triton.backend import TritonBackend  # needs a card

    return TritonBackend(dense_until)


PATHS: Mapping[str, SelectionPath] = {
    "sdpa-masked": SelectionPath(
        "sdpa",
        "all keys, those that were not chosen masked",
        lambda: GatheredBackend(_EVERY_LENGTH),
    ),
    "sdpa-gathered": SelectionPath(
        "sdpa", "the chosen blocks gathered for every token", lambda: GatheredBackend(_NO_LENGTH)
    ),
    "triton-masked": SelectionPath(
        "triton", "causal attention with a bit for each block", lambda: _triton(_EVERY_LENGTH)
    ),
    "triton-items": SelectionPath(
        "triton",
        "key block by key block with the queries that chose it",
        lambda: _triton(_NO_LENGTH),
    ),
}


def paths_on(facts: DeviceFacts) -> dict[str, str | None]:
    """Every path, with the reason why it does not exist on a device; None where it does."""
    return {name: refusal(path.backend, "selected", facts) for name, path in PATHS.items()}
