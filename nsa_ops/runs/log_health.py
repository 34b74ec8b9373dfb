"""Judge a log file that another trainer wrote, with the rules that watch our runs."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.training import WatchdogLimits
from nsa_ops.errors import ConfigurationError
from nsa_ops.pod.foreign_logs import parse_log
from nsa_ops.pod.replay import Replay, replay
from nsa_ops.pod.verdict import Level
from nsa_ops.runs.named_file import read_named


@dataclass(frozen=True)
class LogHealth:
    """What the rules find in a log.

    Attributes:
        path: The file.
        level: The worst level that any rule gave.
        replay: Number of records, and the first alarm of each rule and level.
    """

    path: Path
    level: Level
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
    level: Level = "healthy"
    if told.alarms:
        level = "halt" if told.first("halt") else "warn"
    return LogHealth(path=path, level=level, replay=told)
