"""Start the watchdog of a run again when it has died: the runner does, while its trainer runs.

The lock of the watchdog keeps it single: one too many ends at once.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Literal

from nsa_core.rundir import events
from nsa_core.rundir.layout import RunDir
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import is_running

LOOK_S = 30.0
#: A watchdog that dies again and again has a reason that another start does not change.
MAX_STARTS = 3
Start = Callable[[RunDir, str], "subprocess.Popen[bytes]"]


def start_part(
    part: Literal["runner", "watchdog"], run: RunDir, module: str
) -> "subprocess.Popen[bytes]":
    """Start the runner or the watchdog of a run in a session of its own."""
    with run.watchdog_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"nsa_ops.pod.{part}", "--run-dir", str(run.root),
             "--module", module],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def start_watchdog(run: RunDir, module: str) -> "subprocess.Popen[bytes]":
    """Start the watchdog of a run, as `start_part`."""
    return start_part("watchdog", run, module)


class WatchdogKeeper:
    """Looks after the watchdog of one attempt from a thread, until it is stopped."""

    def __init__(
        self, run: RunDir, attempt: int, module: str, start: Start = start_watchdog
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._module = module
        self._start = start
        self._num_starts = 0
        self._started: list[
            subprocess.Popen[bytes]
        ] = []  # kept: one that is forgotten while it runs is warned of
        self._is_over = threading.Event()

    def begin(self) -> None:
        """Look every `LOOK_S` seconds from now on."""
        threading.Thread(target=self._keep, name="keep-watched", daemon=True).start()

    def stop(self) -> None:
        """The attempt ends: start no more watchdogs."""
        self._is_over.set()

    @property
    def pids(self) -> set[int]:
        """Of the watchdogs that it has started."""
        return {process.pid for process in self._started}

    def _keep(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Start the watchdog if the one that the run had is dead; each start is an event.

        A run that never had one, or whose watchdog is done with this attempt, is left alone. One
        that was done with an attempt before may have missed that this one was begun.
        """
        watchdog = read_watchdog(self._run)
        if watchdog is None or is_running(watchdog.identity):
            return
        if watchdog.doing == "done" and watchdog.attempt >= self._attempt:
            return
        if self._num_starts == MAX_STARTS:
            return
        self._num_starts += 1
        which = f"start {self._num_starts} of {MAX_STARTS}"
        why = f"the watchdog, pid {watchdog.identity.pid}, is dead: {which} by the runner"
        try:
            events.record(
                self._run, kind="watchdog_started", by="runner", attempt=self._attempt, message=why
            )
            self._started.append(self._start(self._run, self._module))
        except OSError as error:  # the next look tries again; it counts as a start
            sys.stderr.write(f"warning: {why}: {error}\n")
