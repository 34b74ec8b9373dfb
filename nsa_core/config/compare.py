"""What two configurations do not share, and whether weights of one fit the other."""

from dataclasses import dataclass
from typing import Any

from nsa_core.config.recipe import leaves
from nsa_core.config.run import RunConfig


@dataclass(frozen=True)
class ChangedValue:
    """A value that is another one now, by its dotted key."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        """The same for people."""
        return f"{self.key} {self.before} -> {self.now}"


def differing_values(before: RunConfig, now: RunConfig) -> list[ChangedValue]:
    """Values that two configurations do not share, in the order of the fields."""
    old, new = leaves(before), leaves(now)
    return [ChangedValue(key, old[key], new[key]) for key in old if old[key] != new[key]]


def other_model(before: RunConfig, now: RunConfig) -> ChangedValue | None:
    """The first value by which two models differ, so that weights of one are none of the other."""
    changed = differing_values(before, now)
    return next((one for one in changed if one.key.startswith("model.")), None)
