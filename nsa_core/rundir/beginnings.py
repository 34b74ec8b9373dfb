"""At which step each attempt of a run went on: what an earlier one did beyond it was abandoned."""

from collections.abc import Iterable

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.events import find_events
from nsa_core.rundir.layout import RunDir

#: Attempts that are looked back at.
MAX_BEGINNINGS = 1000


class Beginning(TolerantModel):
    """An attempt, and the step that it went on from; 0 where it began afresh."""

    attempt: int
    step: int


def read_beginnings(run: RunDir) -> list[Beginning]:
    """Of the newest attempts that went on from something, oldest first, as their trainers tell."""
    told = [
        (event.attempt, event.facts.get("step"))
        for event in find_events(run, "resumed")
        if event.by == "trainer"
    ]
    found = [
        Beginning(attempt=attempt, step=step) for attempt, step in told if isinstance(step, int)
    ]
    return found[-MAX_BEGINNINGS:]


def is_abandoned(attempt: int, step: int, beginnings: Iterable[Beginning]) -> bool:
    """Whether a later attempt went back behind a step that an attempt has saved; pure."""
    return any(one.attempt > attempt and one.step < step for one in beginnings)
