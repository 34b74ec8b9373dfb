"""What can go wrong for the operator: one sentence, what to do next, and an exit code."""

from typing import ClassVar


class OpsError(Exception):
    """An error that ends a command with one line, a hint and an exit code.

    Attributes:
        message: What failed, with the value and the limit; no full stop.
        hint: What to do about it, usually the next command; empty if nothing can be said.
        exit_code: Exit code of the command; 1 means a bug.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigurationError(OpsError):
    """Usage or configuration: an unknown flag, key or value, or values that cannot go together."""

    exit_code = 2


class RefusedError(OpsError):
    """A guardrail or a red preflight forbids it."""

    exit_code = 3


class AuthenticationError(OpsError):
    """The pod refused us, or its host key is not the pinned one."""

    exit_code = 4


class PodUnreachableError(OpsError):
    """The pod did not answer; says nothing about the runs on it."""

    exit_code = 5


class NotFoundError(OpsError):
    """A pod, run, checkpoint or file that does not exist."""

    exit_code = 6


class StateConflictError(OpsError):
    """The state of the run or pod forbids it, such as another run under the same id."""

    exit_code = 7


class DeadlineError(OpsError):
    """Something took longer than its deadline."""

    exit_code = 8


class VerificationError(OpsError):
    """Content is not what its hash or its record says."""

    exit_code = 9


class PartialError(OpsError):
    """A part was done and a part was not; the message says which."""

    exit_code = 10


class LocalResourceError(OpsError):
    """This machine lacks something: disk, a program, the right to write."""

    exit_code = 11


class HaltVerdictError(OpsError):
    """`health`: a rule of the watchdog halts the run."""

    exit_code = 25


class UnknownVerdictError(OpsError):
    """Too little of a log, or of the evidence about a machine, could be read for a verdict."""

    exit_code = 26


class InterruptedByOperatorError(OpsError):
    """Ctrl-C: says what continues."""

    exit_code = 130


class Terminated(KeyboardInterrupt):
    """TERM, which `timeout` and cancelled jobs send; it is taken as Ctrl-C is."""


class TerminatedError(InterruptedByOperatorError):
    """TERM: says what continues; the code is what the signal gives: 128 + 15."""

    exit_code = 143


class ReaderGoneError(OpsError):
    """The reader of stdout left, as with `| head`; the code is what SIGPIPE gives: 128 + 13."""

    exit_code = 141
