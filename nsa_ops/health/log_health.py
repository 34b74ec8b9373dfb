"""Judge a log file that another trainer wrote, with the rules that watch our runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsa_core.config.training import WatchdogLimits
from nsa_ops.errors import (
    ConfigurationError,
    HaltVerdictError,
    OpsError,
    UnknownVerdictError,
)
from nsa_ops.health.foreign_logs import parse_log
from nsa_ops.health.foreign_reader import ForeignLog
from nsa_ops.health.replay import Replay, replay
from nsa_ops.named_file import read_named
from nsa_ops.quantities import count_of


@dataclass(frozen=True)
class LogHealth:
    """What the rules find in a log.

    Attributes:
        path: The file.
        level: The worst level that any rule gave; `unknown` where no rule found anything in a log
            that was read in part only.
        num_unread: Lines with figures that were not understood, all of one shape.
        replay: Number of records, and the first alarm of each rule and level.
    """

    path: Path
    level: Literal["healthy", "warn", "halt", "unknown"]
    num_unread: int
    replay: Replay


def judge_log(path: Path, run_id: str | None = None) -> LogHealth:
    """Replay a log record by record.

    Raises:
        ConfigurationError: If a run is named as well, or the file has no record that is understood.
        OpsError: As `read_named`.
    """
    if run_id is not None:
        message = f"Run `{run_id}` and `--log {path}` cannot be judged at once"
        raise ConfigurationError(message, hint="Leave one of the two out")
    log = parse_log(read_named(path, "Log").decode(errors="replace"))
    if not log.beats and not log.error:
        message = f"Log `{path}` has no line that tells of a training step"
        raise ConfigurationError(message, hint="A line needs a step and a loss")
    told = replay(log, WatchdogLimits())
    return LogHealth(path, _level(log, told), log.num_unread, told)


def failure_of(health: LogHealth) -> OpsError | None:
    """What the verdict on a log means where it is a failure."""
    if health.level == "halt":
        message = f"`{health.path}` has records that would halt a run"
        return HaltVerdictError(message, hint="See each rule in docs/watchdog.md")
    if health.level == "unknown":
        message = (
            f"{count_of(health.replay.num_records, 'record')} of `{health.path}` could be read, "
            f"and {count_of(health.num_unread, 'line')} could not"
        )
        return UnknownVerdictError(message, hint="A line needs a step and a loss")
    return None


def _level(log: ForeignLog, told: Replay) -> Literal["healthy", "warn", "halt", "unknown"]:
    if told.alarms:
        return "halt" if told.first("halt") else "warn"
    return "unknown" if log.num_unread > len(log.beats) else "healthy"
