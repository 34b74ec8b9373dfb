"""events.jsonl: everything that happened to a run, by whom and why."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.bounded_json import MAX_HISTORY_BYTES, find_last_records, read_last_records
from nsa_core.rundir.layout import RunDir


class Event(TolerantModel):
    """One thing that happened.

    Attributes:
        kind: launched, first_step, saved, checkpoint_rejected, anomaly, halt_asked, halt_ack,
            stale_halt, signal, resumed, rolled_back, restarted, ended, save_failed, torn_line,
            unreadable, watchdog_started, watchdog_ended…
        by: trainer, watchdog, runner or operator.
        facts: Numbers and names behind `message`.
    """

    ts: float
    iso: str
    attempt: int
    kind: str
    by: str
    message: str = ""
    facts: dict[str, Any] = {}


def record(
    run: RunDir,
    *,
    kind: str,
    by: str,
    attempt: int,
    message: str = "",
    facts: dict[str, Any] | None = None,
) -> Event:
    """Append an event to the run and return it."""
    now = time.time()
    event = Event(
        ts=now,
        iso=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        attempt=attempt,
        kind=kind,
        by=by,
        message=message,
        facts=facts or {},
    )
    append_line(run.events, event.model_dump_json())
    return event


def read_events(run: RunDir) -> list[Event]:
    """Events that can be read, oldest first; a torn line, or one older than a run has, is not."""
    return read_last_records(run.events, Event, MAX_HISTORY_BYTES).records


def find_events(run: RunDir, *kinds: str) -> list[Event]:
    """Events of these kinds, oldest first, however many others there are."""
    found = find_last_records(run.events, Event, [f'"{kind}"' for kind in kinds])
    return [event for event in found if event.kind in kinds]


#: Newest attempts that `read_beginnings` returns.
MAX_BEGINNINGS = 1000


class Beginning(TolerantModel):
    """An attempt, and the step that it continued from; 0 where it began afresh."""

    attempt: int
    step: int


def read_beginnings(run: RunDir) -> list[Beginning]:
    """Of the newest attempts that continued from a step, oldest first, as their trainers report."""
    found = [
        Beginning(attempt=event.attempt, step=step)
        for event in find_events(run, "resumed")
        if event.by == "trainer" and isinstance(step := event.facts.get("step"), int)
    ]
    return found[-MAX_BEGINNINGS:]


def is_abandoned(attempt: int, step: int, beginnings: Iterable[Beginning]) -> bool:
    """Whether a later attempt went back behind a step that an attempt has saved; pure."""
    return any(one.attempt > attempt and one.step < step for one in beginnings)
