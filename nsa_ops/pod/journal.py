"""What a watchdog writes: events, its log, and watchdog.json, which shows that it lives."""

import os
import sys
import time
from contextlib import suppress

from nsa_core.rundir import events
from nsa_core.rundir.atomic import append_line, write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import identify
from nsa_ops.pod.messages import Doing, WatchdogRecord
from nsa_ops.pod.rules.verdict import Verdict

_SAME_AGAIN_S = 1.0
#: Kind of the event that a watchdog records when a signal ends it.
WATCHDOG_ENDED = "watchdog_ended"


def read_watchdog(run: RunDir) -> WatchdogRecord | None:
    """watchdog.json; None if there is none or it cannot be read."""
    try:
        return read_model(WatchdogRecord, run.watchdog)
    except (OSError, ValueError):
        return None


class Journal:
    """Writes for one watchdog; a full disk or a closed terminal never ends the watch."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._record: WatchdogRecord | None = None
        self._shown_at = 0.0

    def note(self, attempt: int, kind: str, message: str, **facts: object) -> None:
        """Record an event and print it."""
        with suppress(OSError):  # the disk may be full
            events.record(
                self._run, kind=kind, by="watchdog", attempt=attempt, message=message,
                facts=dict(facts),
            )  # fmt: skip
        line = f"{time.strftime('%H:%M:%S', time.gmtime())} {kind}: {message}"
        with suppress(OSError):  # as above
            append_line(self._run.watchdog_log, line)
        with suppress(OSError):  # the terminal may be closed
            if sys.stdout.isatty():
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

    def show(
        self,
        attempt: int,
        verdict: Verdict,
        doing: Doing,
        why: str,
        *,
        restarts: int,
        best_tokens_per_s: float | None = None,
    ) -> None:
        """Write watchdog.json at every change, and at most once a second without one."""
        identity = identify(os.getpid())
        if identity is None:
            return
        record = WatchdogRecord(
            run_id=self._run.run_id, attempt=attempt, identity=identity, verdict=verdict,
            doing=doing, why=why, restarts=restarts,
            best_tokens_per_s=best_tokens_per_s, ts=time.time(),
        )  # fmt: skip
        changed = self._record is None or (doing, why) != (self._record.doing, self._record.why)
        if changed or time.monotonic() - self._shown_at >= _SAME_AGAIN_S:
            self._write(record)

    def show_again(self) -> None:
        """Show the same once more, with the time: for use while waiting."""
        if self._record is not None and time.monotonic() - self._shown_at >= _SAME_AGAIN_S:
            self._write(self._record.model_copy(update={"ts": time.time()}))

    def _write(self, record: WatchdogRecord) -> None:
        self._record, self._shown_at = record, time.monotonic()
        with suppress(OSError):  # the disk may be full
            write_text(self._run.watchdog, record.model_dump_json(indent=2) + "\n")
