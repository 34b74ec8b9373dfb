"""What asks a run to stop or save: `.HALT`, TERM, INT, USR1 and USR2."""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nsa_core.rundir.halt import HaltRequest, describe_halt_file, read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest

#: The trainer promises to be gone 25 s after TERM; this leaves a second to write exit.json.
TERM_DEADLINE_S = 24.0


@dataclass(frozen=True)
class StopRequest:
    """Why the run should stop now.

    Attributes:
        kind: `halt` for a stop request in the run directory, `signal` for TERM or INT.
        reason: One line.
        save_checkpoint: Save before stopping.
        halt: The request behind `halt`.
    """

    kind: Literal["halt", "signal"]
    reason: str
    save_checkpoint: bool = True
    halt: HaltRequest | None = None


class StopAskedError(Exception):
    """Unwinds to the last step boundary, whose state is then saved."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request


class SignalWatch:
    """Signals as flags, with a thread that keeps the promise of TERM while the loop is blocked.

    Handlers of Python run only between two bytecodes of the main thread, so a loop that waits in
    C would not notice. The kernel-level handler writes each signal's number into a pipe at once;
    the thread behind the pipe ends the process at the second TERM or at the deadline.
    """

    def __init__(
        self, exit_now: Callable[[str], None], *, deadline_s: float = TERM_DEADLINE_S
    ) -> None:
        self._exit_now = exit_now
        self._deadline_s = deadline_s
        self._term_count = 0
        self._is_done = False
        self.stop_signal: str | None = None
        self.save_asked = False

    def install(self, run: RunDir, rank: int = 0) -> None:
        """Take over USR1, USR2, TERM and INT; main thread only."""
        self._dump = run.stack_dump(rank).open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._dump, all_threads=True, chain=False)
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, _seen)
        threading.Thread(target=self._watch, name="signal-watch", daemon=True).start()

    def disarm(self) -> None:
        """The run is ending in good order: the deadline no longer applies."""
        self._is_done = True

    def _watch(self) -> None:
        while True:
            for number in os.read(self._read_end, 64):
                self._take(number)

    def _take(self, number: int) -> None:
        if number == signal.SIGUSR2:
            self.save_asked = True
        if number not in (signal.SIGTERM, signal.SIGINT):
            return
        self._term_count += 1
        if self._term_count > 1 and not self._is_done:
            self._exit_now("a second stop signal")
        self.stop_signal = signal.Signals(number).name
        timer = threading.Timer(self._deadline_s, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        if not self._is_done:
            self._exit_now(f"no clean stop within {self._deadline_s:.0f} s of {self.stop_signal}")


def _seen(number: int, frame: object) -> None:
    """Python-level handler: the pipe has the signal already."""
    del number, frame


class StopWatch:
    """Answers one question at every step, micro-step, evaluation batch and data wait: stop?"""

    def __init__(
        self,
        run: RunDir,
        manifest: RunManifest,
        signals: SignalWatch,
        report_stale: Callable[[str], None],
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._signals = signals
        self._report_stale = report_stale
        self._at_start = self._read_mark()
        self._seen_stale: tuple[int, int] | None = None

    def poll(self) -> StopRequest | None:
        """The stop that is asked for now, if any; a file, which has a reason, before a signal."""
        asked = self._poll_file()
        if asked is None and self._signals.stop_signal is not None:
            return StopRequest("signal", f"received {self._signals.stop_signal}")
        return asked

    def check(self) -> None:
        """Poll, as micro-steps, evaluation, staging and data waits do it.

        Raises:
            StopAskedError: If a stop is asked for.
        """
        request = self.poll()
        if request is not None:
            raise StopAskedError(request)

    def take_save_request(self) -> bool:
        """Whether USR2 came since the last call."""
        asked, self._signals.save_asked = self._signals.save_asked, False
        return asked

    def _poll_file(self) -> StopRequest | None:
        mark = self._read_mark()
        if mark is None or mark == self._seen_stale:
            return None
        request = read_halt(
            self._run,
            run_id=self._manifest.run_id,
            attempt=self._manifest.attempt,
            has_appeared=mark != self._at_start,
        )
        if request is None:
            self._seen_stale = mark
            self._report_stale(describe_halt_file(self._run) or "removed meanwhile")
            return None
        return StopRequest("halt", request.reason, request.save_checkpoint, request)

    def _read_mark(self) -> tuple[int, int] | None:
        """What tells one `.HALT` from another; None without one."""
        try:
            status = self._run.halt.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
