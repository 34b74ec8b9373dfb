"""The ranks that train together: what they add up, agree on, and hand to one another.

One rank alone is here, and needs no torch; several are in joined_group.py.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nsa_core.env import RankEnvironment

if TYPE_CHECKING:  # it takes seconds to load
    from torch import Tensor


class RankGroup:
    """One rank alone: it agrees with itself, and torch.distributed is not begun.

    Attributes:
        has_agreed: All ranks know that they end now.
    """

    def __init__(self, place: RankEnvironment | None = None) -> None:
        self.place = place or RankEnvironment()
        self.has_agreed = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which keeps tables and checkpoints."""
        return self.place.is_first

    def add_up(self, numbers: Sequence[int]) -> list[int]:
        """The sums of these whole numbers over all ranks."""
        return list(numbers)

    def gather(self, content: bytes) -> list[bytes]:
        """What every rank gave, by rank."""
        return [content]

    def from_first(self, content: bytes) -> bytes:
        """What rank 0 gave."""
        return content

    def as_first(self, *, claim: bool) -> bool:
        """Whether rank 0 claims it."""
        return bool(self.from_first(b"\1" if claim else b""))

    def sum_in_place(self, tensor: "Tensor") -> None:
        """Replace a tensor on the device of this rank by its sum over all ranks."""

    def copy_from_first(self, tensor: "Tensor") -> None:
        """Replace a tensor on the device of this rank by that of rank 0."""

    def tighten(self, timeout_s: float) -> None:
        """From now on a collective may take so long."""

    def leave(self, code: int, wait: Callable[[], bool]) -> bool:
        """Whether all ranks end with this code, because they agreed to.

        `wait` is called a few times a second while others are not there yet; False gives up.
        """
        del code, wait
        return True
