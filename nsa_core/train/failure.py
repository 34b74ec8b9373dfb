"""How a rank ends, and the errors that end it, each with its own exit code."""

from dataclasses import dataclass

from nsa_core.rundir.exit import TrainerExit


@dataclass(frozen=True)
class AttemptEnd:
    """How a rank ends.

    Attributes:
        is_shared: All ranks end so after the same step.
        follows: Another rank is the cause.
    """

    code: TrainerExit
    reason: str
    is_shared: bool = False
    follows: bool = False


class TrainerError(Exception):
    """An end with a sentence, the next command and an exit code; never a bug.

    Attributes:
        code: Exit code of the process.
        hint: What to do about it, in one line.
        is_shared: All ranks raise it after the same step.
        follows: Another rank is the cause.
    """

    code: TrainerExit
    is_shared = False
    follows = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TrainerConfigurationError(TrainerError):
    """The manifest or the machine does not allow this run."""

    code = TrainerExit.CONFIGURATION


class CheckpointError(TrainerError):
    """No checkpoint can be loaded where there should be one."""

    code = TrainerExit.CHECKPOINT


class NonFiniteError(TrainerError):
    """Too many steps had a loss or gradient that is not a usable number."""

    code = TrainerExit.NONFINITE
    is_shared = True


class RankLostError(TrainerError):
    """Another rank is gone, or a link to it: a collective failed."""

    code = TrainerExit.CRASHED
    follows = True


class RunIsTakenError(TrainerError):
    """The run directory belongs to another process or to an attempt that has ended."""

    code = TrainerExit.DO_NOT_RESTART


class DiskFullError(TrainerError):
    """Checkpoints could not be written for too long."""

    def __init__(self, message: str, *, has_checkpoint: bool, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = TrainerExit.HALTED if has_checkpoint else TrainerExit.DO_NOT_RESTART
