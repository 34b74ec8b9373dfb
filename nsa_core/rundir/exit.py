"""exit.json: how an attempt ended, and the trainer's exit codes."""

from enum import IntEnum

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import move_aside, write_bytes, write_text
from nsa_core.rundir.bounded_json import DOCUMENT, JsonError, read_bounded, read_model
from nsa_core.rundir.layout import RunDir


class TrainerExit(IntEnum):
    """Exit codes of the trainer (`python -m nsa_core.train`)."""

    FINISHED = 0
    CRASHED = 1
    CONFIGURATION = 2
    HALTED = 10
    NONFINITE = 12
    OUT_OF_MEMORY = 13
    DATA = 14
    CHECKPOINT = 15
    HANG = 16
    RESUMABLE = 75
    DO_NOT_RESTART = 93

    @property
    def watchdog_may_restart(self) -> bool:
        """Whether the watchdog may begin another attempt by itself after this code."""
        return self in {TrainerExit.RESUMABLE, TrainerExit.CRASHED}


#: Rules by which the watchdog ends a trainer that cannot end itself: the end has the code `HANG`.
HANG_RULES = frozenset({"stall", "heartbeat_stale"})


class ExitRecord(TolerantModel):
    """Content of exit.json.

    Attributes:
        code: Exit code; negative is the signal that ended the process.
        checkpoint_step: Step of the newest whole checkpoint; None without one.
        at: Unix seconds.
        by: `trainer`, or `runner` when the trainer could not write it itself.
    """

    run_id: str
    attempt: int
    code: int
    reason: str
    step: int
    checkpoint_step: int | None
    at: float
    by: str


class _Begun(TolerantModel):
    """What of manifest.json says to which attempt an exit record may belong."""

    attempt: int = 1


def write_exit(run: RunDir, record: ExitRecord) -> None:
    """Write exit.json whole."""
    write_text(run.exit, record.model_dump_json(indent=2) + "\n")


def read_exit(run: RunDir, attempt: int | None = None) -> ExitRecord | None:
    """The exit record of the current attempt; None while it runs or if it cannot be read.

    A record of an earlier attempt than the manifest's is what a kill left behind while the next
    attempt was begun: it is no end of the current one. With `attempt`, one of another attempt is
    None as well.
    """
    record = _read_record(run)
    if record is None or attempt not in {None, record.attempt}:
        return None
    return None if _is_earlier(run, record) else record


def keep_exit(run: RunDir, kept: RunDir) -> None:
    """Copy exit.json of the current attempt, even a damaged one, to the folder that keeps it.

    What cannot be read is moved aside: it says nothing, and the next attempt needs its name.
    """
    record = _read_record(run)
    if record is not None and _is_earlier(run, record):
        return  # the folder of its own attempt has it
    try:
        content = read_bounded(run.exit, DOCUMENT.max_bytes)
    except FileNotFoundError:
        return
    except (JsonError, OSError):
        move_aside(run.exit)
        return
    write_bytes(kept.exit, content)


def _read_record(run: RunDir) -> ExitRecord | None:
    try:
        return read_model(ExitRecord, run.exit)
    except (OSError, ValueError):
        return None


def _is_earlier(run: RunDir, record: ExitRecord) -> bool:
    """Whether the manifest names a later attempt; one that cannot be read hides no record."""
    try:
        return record.attempt < read_model(_Begun, run.manifest).attempt
    except (OSError, ValueError):
        return False
