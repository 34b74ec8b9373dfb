"""Train two more steps of a run that has ended, in this process."""

import csv
import time

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import begin_next_attempt, read_manifest
from nsa_core.train.loop import train
from tests.core.train.sessions import opened


def train_two_steps(run: RunDir, step: int) -> list[float]:
    """Begin the next attempt, which ends two steps after `step`; returns the losses of both."""
    config = read_manifest(run).config
    schedule = config.schedule.model_copy(update={"steps": step + 2})
    begin_next_attempt(
        run,
        at_unix_s=time.time(),
        changes={"config": config.model_copy(update={"schedule": schedule})},
    )
    with opened(run) as session:
        train(session)
    with run.training_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["loss"]) for row in rows if int(row["step"]) > step]
