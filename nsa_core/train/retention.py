"""Which checkpoints are kept: the newest, every M-th, and the last known good one."""

import re
import shutil
from collections.abc import Sequence

from nsa_core.config.training import CheckpointConfig
from nsa_core.rundir import retention
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.checkpoint import list_checkpoints, read_known_good_name
from nsa_core.rundir.layout import RunDir

#: Folders that `set_aside_later` of resume.py has renamed.
_ASIDE = re.compile(r"aside_attempt\d+_step_(\d{6,})(?:_again)*")
#: Steps without an anomaly after a checkpoint that make it a known good one.
CLEAN_STEPS = 50


def plan_removal(
    steps: Sequence[int], config: CheckpointConfig, known_good: int | None
) -> list[int]:
    """Steps of the checkpoints that may go; pure.

    Args:
        steps: Steps of all whole checkpoints, in any order.
        config: What to keep.
        known_good: Step of the last known good checkpoint, always kept.
    """
    protected = () if known_good is None else (known_good,)
    return retention.plan_removal(
        steps, keep_last=config.keep_last, keep_every=config.keep_every, protected=protected
    )


def find_known_good(
    saved_steps: Sequence[int], step: int, last_anomaly_step: int | None
) -> int | None:
    """The newest checkpoint with `CLEAN_STEPS` steps after it and no anomaly since; pure."""
    good = [
        saved
        for saved in saved_steps
        if step - saved >= CLEAN_STEPS and (last_anomaly_step is None or last_anomaly_step <= saved)
    ]
    return max(good, default=None)


def read_known_good(run: RunDir) -> int | None:
    """Step of the checkpoint that `known_good` names, if it is still there; errors as there."""
    name = read_known_good_name(run)
    found = [c.step for c in list_checkpoints(run) if c.path.name == name]
    return found[0] if found else None


def write_known_good(run: RunDir, step: int) -> None:
    """Name the last known good checkpoint for whoever rolls back."""
    write_text(run.known_good, run.checkpoint(step).name + "\n")


def apply_retention(run: RunDir, config: CheckpointConfig, known_good: int | None) -> list[int]:
    """Remove what `plan_removal` names; the manifest goes first, so none is ever half whole."""
    steps = [checkpoint.step for checkpoint in list_checkpoints(run)]
    removed = plan_removal(steps, config, known_good)
    for step in removed:
        folder = run.checkpoint(step)
        doomed = folder.with_name(f".writing_removed_{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)
    _remove_aside(run, known_good)
    return removed


def _remove_aside(run: RunDir, known_good: int | None) -> None:
    """Remove checkpoints of an abandoned future, once a known good one has passed their step."""
    for folder in run.checkpoints.glob("aside_*"):
        step = _ASIDE.fullmatch(folder.name)
        if step and known_good is not None and int(step[1]) <= known_good:
            shutil.rmtree(folder)
