"""Judge a log file that another trainer wrote, with the rules that watch our runs."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.training import WatchdogLimits
from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.pod.foreign_logs import parse_log
from nsa_ops.pod.replay import Replay, replay
from nsa_ops.pod.verdict import Level


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
        NotFoundError: If the file cannot be read.
    """
    if run_id is not None:
        message = f"Run `{run_id}` and `--log {path}` cannot be judged at once"
        raise ConfigurationError(message, hint="Leave one of the two out")
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        message = f"Log `{path}` cannot be read: {error.strerror}"
        raise NotFoundError(message, hint="Check the path") from error
    log = parse_log(text)
    if not log.beats and not log.error:
        message = f"Log `{path}` has no line that tells of a training step"
        raise ConfigurationError(message, hint="A line needs a step and a loss")
    told = replay(log, WatchdogLimits())
    level: Level = "healthy"
    if told.alarms:
        level = "halt" if told.first("halt") else "warn"
    return LogHealth(path=path, level=level, replay=told)
