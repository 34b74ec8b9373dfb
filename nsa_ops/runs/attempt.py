"""Start an attempt of a run, and wait until it is up: the one way for launch, resume and move."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.agents import ask_each, probe_run
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import ConfigurationError, OpsError, VerificationError
from nsa_ops.pod.messages import RunReport
from nsa_ops.remote.snapshot import Snapshot, ship
from nsa_ops.runs.choose import LIVING
from nsa_ops.runs.lease import Takeover, holding, lease_held, record_takeover
from nsa_ops.runs.wait import ENDED, TELL_EVERY_S, poll
from nsa_ops.runs.windows import TRAIN, list_windows, runner_ended, start_session, start_watchdog
from nsa_ops.store import RunRecord

FIRST_BEAT_S = 300.0
#: After the data was opened: a full card shows within seconds.
SETTLE_S = 6.0
#: After the data phase began: data that cannot be used shows by then; good data may take hours.
STAGING_S = 60.0
_LOG_TAIL_BYTES = 16_384
_LOG_LINES = 15
#: A resumed attempt gives the step of its checkpoint already here.
_BEFORE_TRAINING = frozenset({"init", "data"})
_OPERATORS_FAULT = {TrainerExit.CONFIGURATION, TrainerExit.DATA, TrainerExit.CHECKPOINT}


@dataclass(frozen=True)
class AttemptStart:
    """A planned attempt; launch, resume and move, on one pod or several, differ in nothing else.

    Attributes:
        runs: The run on each pod where it is to train, by node rank, with the code that it uses.
        take: Checks, under the lease, that the plan still holds; what it takes from other pods.
        begin: Ships code, and makes the run directories or their next attempts; what was done
            before is left alone.
        known: The run as the registry knows it; None where `begin` registers it.
        detail: What the intent remembers beside pods, code and module.
        may_be_started: An earlier command may have started this attempt; then only watchdogs are
            started that are gone.
    """

    act: Literal["launch", "resume"]
    runs: tuple[RunHandle, ...]
    module: str
    take: Callable[[], Sequence[Takeover]]
    begin: Callable[[], None]
    known: RunRecord | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    may_be_started: bool = False


@dataclass(frozen=True)
class FirstBeat:
    """A run that came up.

    Attributes:
        after_s: Seconds from the start to the first heartbeat; None if it was started before.
    """

    report: RunReport
    after_s: float | None


def start_attempt(operator: Operator, start: AttemptStart) -> FirstBeat:
    """Start on one pod what was planned; repeated after a cut, it continues where it stopped.

    Raises:
        StateConflictError: If another command starts or moves the run, or did since the plan.
        OpsError: If a step fails or the run does not come up; see `await_first_beat`.
    """
    (run,) = start.runs
    with begun(operator, start) as (before,):
        if start.may_be_started and before.state != "planned":
            watch_again(operator, start, [before])
            return FirstBeat(before, None)
        started_s = operator.clock.monotonic_s()
        start_session(run, start.module)
        operator.tell(f"started {run.run_id}; waiting until it has opened its data")
        return await_first_beat(operator, run, started_s, before.log_bytes)


@contextmanager
def begun(operator: Operator, start: AttemptStart) -> Iterator[list[RunReport]]:
    """Begin an attempt; under its lease and its intent, the block starts it.

    What each pod shows of it then is the value of the block.
    """
    first, store = start.runs[0], operator.store
    with lease_held(operator, first.run_id):
        taken = start.take()
        names = [run.pod for run in start.runs]
        detail = {"pod": first.pod, "pods": names, "code_id": first.code_id, "module": start.module}
        detail |= {"moved_from": taken[0].left} if taken[0].left else {}
        with store.intent(start.act, first.run_id, **detail, **start.detail):
            for one in taken:
                record_takeover(operator, one)
            start.begin()
            before = ask_each(start.runs, probe_run)
            if start.known is not None:
                store.save_run(holding(start.known, first.link, before[0].manifest))
            yield before


def ship_to(operator: Operator, link: PodLink, snapshot: Snapshot | None) -> None:
    """Bring code to a pod that does not have it; None is code that it has."""
    if snapshot is None:
        return
    if ship(snapshot, link.transport, link.record.python, link.code(snapshot.code_id)):
        operator.tell(f"code {snapshot.code_id} shipped")


def watch_again(operator: Operator, start: AttemptStart, reports: Sequence[RunReport]) -> None:
    """Start the watchdogs that are gone of an attempt that an earlier command has started."""
    operator.tell(f"{reports[0].run_id} was launched before")
    for run, report in zip(start.runs, reports, strict=True):
        if report.state in LIVING and not report.watchdog_alive:
            start_watchdog(run, start.module)
            where = f" on pod {run.pod}" if len(reports) > 1 else ""
            operator.tell(f"its watchdog{where} was gone and is started again")


def await_first_beat(
    operator: Operator, run: RunHandle, started_s: float, log_offset: int = 0
) -> FirstBeat:
    """Wait until the current attempt trains, or has its data and settled, or stages for a while.

    The first heartbeat alone proves little: it comes before torch is loaded, which takes from
    seconds to minutes, and before anybody has looked at the data. The log of this attempt begins
    at `log_offset`.

    Raises:
        ConfigurationError: If the trainer ended because of its configuration, data or checkpoint.
        VerificationError: If it or its runner ended for any other reason; the end of its log is
            shown.
        DeadlineError: If it did not come so far in time; the run is left as it is.
    """
    coming = Arrival(run, operator.clock.monotonic_s())

    def is_up(report: RunReport) -> bool:
        return coming.look(report, operator.clock.monotonic_s()) or report.state in ENDED

    report = poll(operator, run, is_up, operator.deadline_s(FIRST_BEAT_S), "the start")
    if report.state in ENDED and report.state != "finished":
        raise did_not_come_up(operator, run, report, log_offset)
    first_s = operator.clock.monotonic_s() if coming.beat_s is None else coming.beat_s
    return FirstBeat(report, first_s - started_s)


class Arrival:
    """Watches one pod of a run until the attempt is up there.

    Attributes:
        beat_s: When its first heartbeat was seen, in monotonic seconds; None before that.
    """

    def __init__(self, run: RunHandle, now_s: float) -> None:
        """The runner was just started."""
        self.beat_s: float | None = None
        self._run = run
        self._looked_s = now_s  # for the window of the runner
        self._is_missing = False
        self._staging_s: float | None = None
        self._opened_s: float | None = None

    def look(self, report: RunReport, now_s: float) -> bool:
        """Whether the attempt is up, by the newest report.

        Raises:
            VerificationError: If its runner has ended without recording itself.
        """
        if report.state == "planned" and self._has_no_runner(now_s):
            raise runner_ended(self._run)
        if report.last_beat is not None:
            self._note(report.last_beat, now_s)
        return self._has_settled(now_s) or _is_training(report)

    def _has_no_runner(self, now_s: float) -> bool:
        """Whether its window was missing at the look before: it may have come and gone since."""
        was_missing = self._is_missing
        if not was_missing and now_s - self._looked_s >= TELL_EVERY_S:
            self._looked_s = now_s
            self._is_missing = TRAIN not in {window.name for window in list_windows(self._run)}
        return was_missing

    def _note(self, beat: Heartbeat, now_s: float) -> None:
        """Note when it first wrote a heartbeat, looked at its data, and had them.

        A short data phase may fall between two looks. The phase `init` alone proves nothing,
        because it comes before the data as well as after.
        """
        if self.beat_s is None:
            self.beat_s = now_s
        if beat.phase == "data":
            self._staging_s = now_s if self._staging_s is None else self._staging_s
        elif self._opened_s is None and (beat.phase != "init" or self._staging_s is not None):
            self._opened_s = now_s

    def _has_settled(self, now_s: float) -> bool:
        """Whether it has lasted longer than bad data or a full card would have let it."""
        if self._opened_s is not None:
            return now_s - self._opened_s >= SETTLE_S
        return self._staging_s is not None and now_s - self._staging_s >= STAGING_S


def _is_training(report: RunReport) -> bool:
    beat = report.last_beat
    return beat is not None and beat.step > 0 and beat.phase not in _BEFORE_TRAINING


def did_not_come_up(
    operator: Operator, run: RunHandle, report: RunReport, log_offset: int
) -> OpsError:
    """The trainer's own last word as an error; the end of its log is shown as progress."""
    for line in _log_tail(run, report, log_offset):
        operator.tell(f"log: {line}")
    hint = f"See it all with `nsa-ops logs {report.run_id}`"
    ended = report.exit
    if ended is None:
        message = f"Run `{report.run_id}` is {report.state}: {report.why}"
        return VerificationError(message, hint=hint)
    message = f"Run `{report.run_id}` ended with code {ended.code}: {ended.reason}"
    kind = ConfigurationError if ended.code in _OPERATORS_FAULT else VerificationError
    return kind(message, hint=hint)


def _log_tail(run: RunHandle, report: RunReport, log_offset: int) -> list[str]:
    """Last lines of a run's log after an offset; none if it has not written any."""
    if report.log_bytes <= log_offset:
        return []
    start = max(log_offset, report.log_bytes - _LOG_TAIL_BYTES)
    path = f"{report.run_dir}/training.log"
    content = run.link.transport.tail(path, start, max_bytes=_LOG_TAIL_BYTES, timeout_s=30.0)
    return content.decode(errors="replace").splitlines()[-_LOG_LINES:]
