"""What asks a run to stop or save: `.HALT`, TERM, INT, USR1 and USR2."""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nsa_core.rundir.halt import HaltRequest, describe_halt_file, read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.group import RankGroup

#: The trainer promises to be gone 25 s after TERM; this leaves a second to write exit.json.
TERM_DEADLINE_S = 24.0
#: A logout, a shutdown or an engine signals every process of a run, and the runner and torchrun
#: forward theirs: what arrives so soon after a stop signal asks for nothing new.
SAME_REQUEST_S = 2.0
_LOOK_S = 1.0


@dataclass(frozen=True)
class StopRequest:
    """Why the run should stop now.

    Attributes:
        reason: One line.
        halt: The stop request in the run directory; None for TERM or INT.
    """

    reason: str
    halt: HaltRequest | None = None

    @property
    def save_checkpoint(self) -> bool:
        """Save before stopping."""
        return self.halt is None or self.halt.save_checkpoint

    def to_bytes(self) -> bytes:
        """The request as it goes to the other ranks."""
        halt = self.halt.model_dump(mode="json") if self.halt else None
        return json.dumps({"reason": self.reason, "halt": halt}).encode()


def _request_from(content: bytes) -> StopRequest:
    found = json.loads(content)
    halt = found["halt"] and HaltRequest.model_validate(found["halt"])
    return StopRequest(found["reason"], halt)


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
        self,
        exit_now: Callable[[str], None],
        *,
        deadline_s: float = TERM_DEADLINE_S,
        same_s: float = SAME_REQUEST_S,
        find_lost: Callable[[], str] = str,
    ) -> None:
        """Nothing is taken over yet.

        `find_lost` says which other rank is gone, so that no collective will end; empty if none.
        A stop signal that comes within `same_s` of another one is the same request.
        """
        self._exit_now = exit_now
        self._deadline_s = deadline_s
        self._find_lost = find_lost
        self._same_s = same_s
        self._asked_at: float | None = None
        self._is_done = False
        self.stop_signal: str | None = None
        self.save_asked = False

    def install(self, run: RunDir, rank: int = 0) -> None:
        """Take over USR1, USR2, TERM and INT; main thread only."""
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, _seen)
        # Last: whoever sees the file of the stacks may rely on the handlers of the others.
        self._dump = run.stack_dump(rank).open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._dump, all_threads=True, chain=False)
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
        asked_at, now_s = self._asked_at, time.monotonic()
        if asked_at is not None and now_s - asked_at < self._same_s:
            return
        if asked_at is not None and not self._is_done:
            self._exit_now("a second stop signal")
        self._asked_at = now_s
        self.stop_signal = signal.Signals(number).name
        threading.Thread(target=self._count_down, name="stop-deadline", daemon=True).start()

    def _count_down(self) -> None:
        end = time.monotonic() + self._deadline_s
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
            if not self._is_done and (lost := self._find_lost()):
                self._exit_now(lost)
        if not self._is_done:
            self._exit_now(f"no clean stop within {self._deadline_s:.0f} s of {self.stop_signal}")


def _seen(number: int, frame: object) -> None:
    """Python-level handler: the pipe has the signal already."""
    del number, frame


class StopWatch:
    """Answers one question at every step, micro-step, evaluation batch and data wait: stop?

    Several ranks answer together, at step, micro-step and evaluation batch. The file is read by
    rank 0, and a signal counts on any rank.
    """

    def __init__(
        self,
        run: RunDir,
        manifest: RunManifest,
        signals: SignalWatch,
        report_stale: Callable[[str], None],
        group: RankGroup | None = None,
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._signals = signals
        self._report_stale = report_stale
        self._group = group or RankGroup()
        self._must_save = False
        self._at_start = self._read_mark()
        self._seen_stale: tuple[int, int] | None = None

    def poll(self) -> StopRequest | None:
        """The stop that is asked for now, if any; a file, which has a reason, before a signal."""
        asked = self._poll_file()
        if asked is None and self._signals.stop_signal is not None:
            return StopRequest(f"received {self._signals.stop_signal}")
        return asked

    def check(self) -> None:
        """Poll on all ranks at once, as micro-steps and evaluation do it.

        Raises:
            StopAskedError: If a stop is asked for, on every rank.
        """
        own = self.poll()
        num_saves, num_stops = self._group.add_up([self._signals.save_asked, own is not None])
        if num_saves:
            self._signals.save_asked, self._must_save = False, True
        if num_stops:
            self._group.has_agreed = True
            raise StopAskedError(self._first_of(own))

    def _first_of(self, own: StopRequest | None) -> StopRequest:
        """The request of the lowest rank that has one."""
        asked = self._group.gather(own.to_bytes() if own else b"")
        return _request_from(next(content for content in asked if content))

    def check_staging(self) -> None:
        """Poll while data is staged, which each rank does by itself.

        Raises:
            StopAskedError: If a stop is asked for here; other ranks then have no one to wait for.
        """
        request = self.poll()
        if request is not None:
            raise StopAskedError(request)

    def check_alone(self) -> None:
        """Poll while this rank waits for its data, which others need not do.

        Several ranks stop when they are together again; a rank that waits for good is ended at the
        deadline of TERM.

        Raises:
            StopAskedError: If a stop is asked for, and this is the only rank.
        """
        if self._group.size == 1:
            self.check()

    def take_save_request(self) -> bool:
        """Whether USR2 came to any rank before the last check."""
        asked, self._must_save = self._must_save, False
        return asked

    def _poll_file(self) -> StopRequest | None:
        if not self._group.is_first:
            return None
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
        return StopRequest(request.reason, request)

    def _read_mark(self) -> tuple[int, int] | None:
        """What tells one `.HALT` from another; None without one."""
        try:
            status = self._run.halt.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
