"""Wait for a run: that it comes up after a start, and the end after a halt."""

from collections.abc import Callable
from dataclasses import dataclass

from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.agents import probe_run
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import (
    ConfigurationError,
    DeadlineError,
    OpsError,
    VerificationError,
)
from nsa_ops.pod.messages import RunReport
from nsa_ops.runs.session import TRAIN, list_windows, runner_ended
from nsa_ops.work import Work

FIRST_BEAT_S = 300.0
#: After the data was opened: a full card shows within seconds.
SETTLE_S = 6.0
#: After the data phase began: data that cannot be used shows by then; good data may take hours.
STAGING_S = 60.0
#: A look starts an interpreter on the pod, whose processor may be training.
POLL_S = 1.0
STORY_S = 10.0
ENDED = frozenset({"finished", "failed", "halted", "lost", "preempted"})
_LOG_TAIL_BYTES = 16_384
_LOG_LINES = 15
#: A resumed attempt tells the step of its checkpoint already here.
_BEFORE_TRAINING = frozenset({"init", "data"})
_OPERATORS_FAULT = {TrainerExit.CONFIGURATION, TrainerExit.DATA, TrainerExit.CHECKPOINT}


@dataclass(frozen=True)
class FirstBeat:
    """A run that came up.

    Attributes:
        report: What the pod showed.
        after_s: Seconds from the start to the first heartbeat.
    """

    report: RunReport
    after_s: float


def await_first_beat(
    operator: Operator,
    link: PodLink,
    code_id: str,
    run_id: str,
    started_s: float,
    log_offset: int = 0,
) -> FirstBeat:
    """Wait until the current attempt trains, or has its data and settled, or stages for a while.

    The first heartbeat alone proves little: it comes before torch is loaded, which takes from
    seconds to minutes, and before anybody has looked at the data.

    Args:
        operator: Who waits.
        link: Pod.
        code_id: Version of the code whose agent looks.
        run_id: Run.
        started_s: Monotonic time of the start.
        log_offset: Where the log of this attempt begins.

    Raises:
        ConfigurationError: If the trainer ended because of its configuration, data or checkpoint.
        VerificationError: If it or its runner ended for any other reason; the end of its log is
            told.
        DeadlineError: If it did not come so far in time; the run is left as it is.
    """
    rise = _Rise()
    runner = _Runner(operator.clock.monotonic_s())

    def is_up(report: RunReport) -> bool:
        now_s = operator.clock.monotonic_s()
        if runner.is_gone(link, report, now_s):
            raise runner_ended(link, run_id)
        rise.look(report.last_beat, now_s)
        return rise.has_settled(now_s) or _is_training(report) or report.state in ENDED

    deadline_s = operator.deadline_s(FIRST_BEAT_S)
    report = poll(operator, link, code_id, run_id, is_up, deadline_s, "the start")
    if report.state in ENDED and report.state != "finished":
        raise _did_not_come_up(operator, link, report, log_offset)
    first_s = operator.clock.monotonic_s() if rise.beat_s is None else rise.beat_s
    return FirstBeat(report, first_s - started_s)


@dataclass
class _Runner:
    """Whether the runner that was started is there, though it has not recorded itself.

    Attributes:
        looked_s: When its window was looked for last, in monotonic seconds.
        is_missing: It was not there then; it may have come and gone since the report before.
    """

    looked_s: float
    is_missing: bool = False

    def is_gone(self, link: PodLink, report: RunReport, now_s: float) -> bool:
        """Whether it was missing at the last look and has recorded nothing since."""
        if report.state != "planned":
            return False
        if self.is_missing:
            return True
        if now_s - self.looked_s >= STORY_S:
            self.looked_s = now_s
            names = {window.name for window in list_windows(link, report.run_id)}
            self.is_missing = TRAIN not in names
        return False


@dataclass
class _Rise:
    """When an attempt was first seen to come so far, in monotonic seconds; None before that.

    Attributes:
        beat_s: It wrote a heartbeat.
        staging_s: It looked at its data.
        opened_s: It had its data. A short data phase may fall between two looks; the phase `init`
            alone therefore proves nothing, because it comes before the data as well as after.
    """

    beat_s: float | None = None
    staging_s: float | None = None
    opened_s: float | None = None

    def look(self, beat: Heartbeat | None, now_s: float) -> None:
        """Note what the newest heartbeat shows."""
        if beat is None:
            return
        if self.beat_s is None:
            self.beat_s = now_s
        if beat.phase == "data":
            self.staging_s = now_s if self.staging_s is None else self.staging_s
        elif self.opened_s is None and (beat.phase != "init" or self.staging_s is not None):
            self.opened_s = now_s

    def has_settled(self, now_s: float) -> bool:
        """Whether it has stood long enough where bad data and a full card would have ended it."""
        if self.opened_s is not None:
            return now_s - self.opened_s >= SETTLE_S
        return self.staging_s is not None and now_s - self.staging_s >= STAGING_S


def _is_training(report: RunReport) -> bool:
    beat = report.last_beat
    return beat is not None and beat.step > 0 and beat.phase not in _BEFORE_TRAINING


def poll(
    operator: Operator,
    link: PodLink,
    code_id: str,
    run_id: str,
    is_done: Callable[[RunReport], bool],
    deadline_s: float,
    what: str,
) -> RunReport:
    """Look at a run until something holds; one round trip a look, shown as long work.

    Raises:
        DeadlineError: If it does not hold in time.
    """
    began_s = operator.clock.monotonic_s()
    with operator.work(f"waiting for {what}") as work:
        while True:
            report = probe_run(link, code_id, run_id)
            if is_done(report):
                return report
            if operator.clock.monotonic_s() - began_s >= deadline_s:
                message = (
                    f"Waited {deadline_s:g} s for {what} of `{run_id}`; "
                    f"it is {report.state} ({report.why})"
                )
                hint = f"Look at `nsa-ops status {run_id}` and `nsa-ops logs {run_id}`"
                raise DeadlineError(message, hint=hint)
            _show(work, report)
            operator.clock.sleep(POLL_S)


def _show(work: Work, report: RunReport) -> None:
    """What a run is doing; as a share where the end of its staging is known."""
    work.detail = f"{report.state}, {describe_progress(report)}"
    share = report.last_beat.staging_share if report.last_beat else None
    work.done, work.total = share, None if share is None else 1.0


def describe_progress(report: RunReport) -> str:
    """Step, and loss and speed of the last record that has them, else the evidence of the state."""
    beat = report.last_beat
    if beat is not None and beat.staging:
        return beat.staging
    record = report.figures.record or beat
    if beat is None or record is None or record.loss is None:
        return report.why
    speed = f", {record.tokens_per_s:,.0f} tokens/s" if record.tokens_per_s else ""
    return f"step {beat.step}/{report.manifest.steps}, loss {record.loss:.3f} nats{speed}"


def _did_not_come_up(
    operator: Operator, link: PodLink, report: RunReport, log_offset: int
) -> OpsError:
    """The trainer's own last word as an error; the end of its log goes into the story."""
    for line in log_tail(link, report, log_offset):
        operator.tell(f"log: {line}")
    hint = f"See it all with `nsa-ops logs {report.run_id}`"
    ended = report.exit
    if ended is None:
        return VerificationError(
            f"Run `{report.run_id}` is {report.state}: {report.why}", hint=hint
        )
    message = f"Run `{report.run_id}` ended with code {ended.code}: {ended.reason}"
    kind = ConfigurationError if ended.code in _OPERATORS_FAULT else VerificationError
    return kind(message, hint=hint)


def log_tail(link: PodLink, report: RunReport, log_offset: int = 0) -> list[str]:
    """Last lines of a run's log after an offset; none if it has not written any."""
    if report.log_bytes <= log_offset:
        return []
    start = max(log_offset, report.log_bytes - _LOG_TAIL_BYTES)
    path = f"{report.run_dir}/training.log"
    content = link.transport.tail(path, start, max_bytes=_LOG_TAIL_BYTES, timeout_s=30.0)
    return content.decode(errors="replace").splitlines()[-_LOG_LINES:]
