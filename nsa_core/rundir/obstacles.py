"""What has the name of a file of a run and cannot be read as one: renamed, so that it goes on."""

import re
from collections.abc import Iterator
from pathlib import Path

from nsa_core.rundir.bounded_json import JsonError, open_regular
from nsa_core.rundir.layout import RunDir

_ASIDE = re.compile(r".+\.aside-[0-9]+", re.DOTALL)


def is_set_aside(name: str) -> bool:
    """Whether a name, or the last part of a path, is one that `move_aside` gives."""
    return _ASIDE.fullmatch(name.rpartition("/")[2]) is not None


def move_aside(path: Path) -> Path:
    """Rename something to the first free `NAME.aside-N` beside it; nothing is deleted.

    Raises:
        OSError: If it cannot be renamed.
    """
    number = 1
    while (target := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return path.rename(target)


def clear_obstacles(run: RunDir, rank: int = 0) -> list[str]:
    """Move aside what has the name of a file of the run and is a folder, a pipe or unreadable.

    A file where a folder belongs is moved as well. Call it under the lock of the run.

    Returns:
        One line for each thing that was moved, or could not be.
    """
    lines = []
    for path, what in _find(run, rank):
        try:
            lines.append(f"{path.name} {what}: renamed to {move_aside(path).name}")
        except OSError as error:
            lines.append(f"{path.name} {what}, and cannot be renamed: {error.strerror}")
    return lines


def _find(run: RunDir, rank: int) -> Iterator[tuple[Path, str]]:
    for folder in (run.checkpoints, run.tensorboard, run.attempt(1).parent):
        if folder.exists() and not folder.is_dir():
            yield folder, "is no folder"
    files = (
        run.heartbeat(rank), run.training_csv, run.validation_csv, run.metrics, run.goodput,
        run.latest, run.known_good, run.reserve, run.final_model, run.events, run.halt, run.config,
        run.anomaly, run.gate_collapse, run.stack_dump(rank), run.hang_report, run.cards, run.exit,
        run.log, run.process, run.watchdog, run.watchdog_log, run.samples, run.env,
    )  # fmt: skip
    for file in files:
        fault = _find_fault(file)
        if fault:
            yield file, fault


def _find_fault(file: Path) -> str:
    """Why a file cannot be read, as its first byte shows; empty if it can, or is not there."""
    try:
        with open_regular(file) as opened:
            opened.read(1)
    except FileNotFoundError:
        return ""
    except IsADirectoryError:
        return "is a folder"
    except JsonError:
        return "is no regular file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""
