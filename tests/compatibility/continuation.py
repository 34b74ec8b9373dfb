"""Train two more steps of a run that has ended, in this process."""

import csv
import time

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import begin_next_attempt, read_manifest
from nsa_core.train.loop import train
from tests.core.train.sessions import opened


def train_two_steps(run: RunDir, step: int) -> list[float]:
    """Begin the next attempt, which ends two steps after `step`; returns the losses of both."""
    manifest = read_manifest(run)
    schedule = manifest.config.schedule.model_copy(update={"steps": step + 2})
    config = manifest.config.model_copy(update={"schedule": schedule})
    wanted = manifest.model_copy(update={"config": config})
    begin_next_attempt(run, at_unix_s=time.time(), wanted=wanted)
    with opened(run) as session:
        train(session)
    with run.training_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["loss"]) for row in rows if int(row["step"]) > step]
