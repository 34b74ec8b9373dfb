"""What a pull brought, what it did not bring, and what that means for its end."""

from dataclasses import dataclass
from pathlib import Path

from nsa_ops.backup.loss import AtMostLost
from nsa_ops.errors import (
    LocalResourceError,
    NotFoundError,
    OpsError,
    PartialError,
    StateConflictError,
    VerificationError,
)

_KINDS: dict[int, type[OpsError]] = {
    kind.exit_code: kind
    for kind in (NotFoundError, StateConflictError, VerificationError, LocalResourceError)
}


@dataclass(frozen=True)
class Problem:
    """One thing that a pull did not bring, or not under its name.

    Attributes:
        message: What, and why.
        hint: What to do about it.
        exit_code: Of the error that it is by itself.
    """

    message: str
    hint: str
    exit_code: int

    @property
    def is_conflict(self) -> bool:
        """The pod has another checkpoint of a step that is held."""
        return self.exit_code == StateConflictError.exit_code

    @property
    def error(self) -> OpsError:
        """The problem as an error."""
        return _KINDS.get(self.exit_code, PartialError)(self.message, hint=self.hint)


@dataclass(frozen=True)
class Pulled:
    """What a pull brought.

    Attributes:
        run_id: Run.
        folder: The backup.
        num_files: Small files that were brought.
        pulled_steps: Checkpoints that were brought.
        present_steps: Checkpoints that were here already and whole.
        newest_step: Newest checkpoint of the backup whose receipt holds; None without one.
        num_bytes: Bytes that came over the link.
        at_risk: What would be lost if the pod were gone now.
        problems: What was refused, failed, or stands against what is held.
    """

    run_id: str
    folder: Path
    num_files: int
    pulled_steps: list[int]
    present_steps: list[int]
    newest_step: int | None
    num_bytes: int
    at_risk: AtMostLost
    problems: list[Problem]

    @property
    def failure(self) -> OpsError | None:
        """What the problems mean for the whole pull: the only one as it is where nothing came."""
        if not self.problems:
            return None
        first = next((one for one in self.problems if one.is_conflict), self.problems[0])
        is_alone = len(self.problems) == 1 and not self.num_files and not self.pulled_steps
        has_no_room = all(one.exit_code == LocalResourceError.exit_code for one in self.problems)
        if first.is_conflict or is_alone or has_no_room:
            return first.error
        count = len(self.problems)
        message = f"{count} of the pod's files were not brought: {first.message}"
        return PartialError(message, hint=first.hint)
