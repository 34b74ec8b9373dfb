"""How a run can end other than well: every error that has its own exit code."""

from nsa_core.rundir.exit import TrainerExit


class TrainerError(Exception):
    """An end with a sentence, the next command and an exit code; never a bug.

    Attributes:
        code: Exit code of the process.
        hint: What to do about it, in one line.
    """

    def __init__(self, message: str, *, code: TrainerExit, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


class ConfigurationError(TrainerError):
    """The manifest or the machine does not allow this run."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, code=TrainerExit.CONFIGURATION, hint=hint)


class CheckpointError(TrainerError):
    """No checkpoint can be loaded where there should be one."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, code=TrainerExit.CHECKPOINT, hint=hint)


class NonFiniteError(TrainerError):
    """Too many steps had a loss or gradient that is not a usable number."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, code=TrainerExit.NONFINITE, hint=hint)


class RunIsTakenError(TrainerError):
    """The run directory belongs to another process or to an attempt that has ended."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, code=TrainerExit.DO_NOT_RESTART, hint=hint)


class DiskFullError(TrainerError):
    """Checkpoints could not be written for too long."""

    def __init__(self, message: str, *, has_checkpoint: bool, hint: str = "") -> None:
        code = TrainerExit.HALTED if has_checkpoint else TrainerExit.DO_NOT_RESTART
        super().__init__(message, code=code, hint=hint)
