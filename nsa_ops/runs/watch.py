"""A run as it goes: frames with each new heartbeat exactly once, and its log byte for byte."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from nsa_core.rundir.events import Event
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.agents import probe_run
from nsa_ops.backup.receipts import AtMostLost
from nsa_ops.context import Operator
from nsa_ops.errors import DeadlineError, NotFoundError, PodUnreachableError, VerificationError
from nsa_ops.pod.messages import Offsets, RunReport
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import LIVE, FoundRun, choose_record, find_run, handle_of, link_of
from nsa_ops.runs.members import look_at_run, others_of
from nsa_ops.runs.status import at_risk_of
from nsa_ops.runs.wait import ENDED

INTERVAL_S = 2.0
_HISTORY = 512
CHUNK_BYTES = 256 * 1024
LOG_INTERVAL_S = 1.0
#: Answers in a row that may say that there is more: 1 GiB, over 3 million heartbeats.
MAX_IN_A_ROW = 4096


@dataclass(frozen=True)
class Frame:
    """One look at a run.

    Attributes:
        beats: Heartbeats since the last frame; the first frame has the newest ones of the past.
        progress: The newest records that carry a loss, for curves.
        at_risk: What would be lost with the pod; None if unknown.
    """

    report: RunReport
    beats: list[Heartbeat]
    events: list[Event]
    progress: list[Heartbeat] = field(default_factory=list)
    at_risk: AtMostLost | None = None

    @property
    def is_last(self) -> bool:
        """The run has ended: nothing more will come."""
        return self.report.state in ENDED


def watch(
    operator: Operator, run_id: str | None, *, once: bool = False, from_start: bool = False
) -> Iterator[Frame]:
    """Frames of a run, one round trip each, by byte offset: nothing lost, nothing repeated.

    A pod that does not answer is reported and asked again; that changes nothing about the run.

    `from_start`: begin with the first heartbeat instead of the newest ones.

    Raises:
        NotFoundError: If there is no such run.
        PodUnreachableError, DeadlineError: If the very first look fails.
        VerificationError: If the pod says for ever that there is more.
    """
    record = choose_record(operator, run_id, among=LIVE)
    run, others = handle_of(link_of(operator, record), record), others_of(operator, record)
    offsets = Offsets(heartbeats=0, events=0) if from_start else Offsets()
    progress: deque[Heartbeat] = deque(maxlen=_HISTORY)
    is_first, num_in_a_row = True, 0
    while True:
        asked = offsets
        try:
            report = look_at_run(operator, run, others, asked)
        except (PodUnreachableError, DeadlineError) as error:
            if is_first:
                raise
            operator.tell(f"{error.message}; trying again; the run is not affected")
            operator.clock.sleep(INTERVAL_S)
            continue
        is_first = False
        offsets = Offsets(heartbeats=report.beats_offset, events=report.events_offset)
        progress.extend(beat for beat in report.beats if beat.loss is not None)
        at_risk = at_risk_of(operator, report)
        frame = Frame(report, report.beats, report.events, list(progress), at_risk)
        yield frame
        has_more = report.beats_more or report.events_more
        if once or (frame.is_last and not has_more):
            return
        if has_more:
            num_in_a_row += 1
            _require_end(record.pod, asked, report, num_in_a_row)
        else:
            num_in_a_row = 0
            operator.clock.sleep(INTERVAL_S)


def _require_end(pod: str, asked: Offsets, report: RunReport, num_in_a_row: int) -> None:
    """Refuse a pod that says that there is more, and gives none of it or comes to no end."""
    is_stuck = (report.beats_more and report.beats_offset <= asked.heartbeats) or (
        report.events_more and report.events_offset <= asked.events
    )
    if not is_stuck and num_in_a_row < MAX_IN_A_ROW:
        return
    why = "gives none of them" if is_stuck else f"has said so {num_in_a_row} times in a row"
    message = f"Pod `{pod}` says that `{report.run_id}` has more heartbeats or events, and {why}"
    hint = f"See how the run is with `nsa-ops status {report.run_id}`"
    raise VerificationError(message, hint=hint)


@dataclass(frozen=True)
class Chunk:
    """A part of a log."""

    content: bytes
    offset: int

    @property
    def next_offset(self) -> int:
        """Where the next part begins."""
        return self.offset + len(self.content)


def read_log(
    operator: Operator,
    run_id: str | None,
    *,
    offset: int = 0,
    follow: bool = False,
    pod: str | None = None,
) -> Iterator[Chunk]:
    """The log from an offset on; following it ends when the run has ended and all is read.

    One part is in memory at a time, and the next one is asked for once this one was taken. Without
    a pause come only full parts up to the size that the pod last named: a pod that gives a byte at
    a time, or more than it has, is asked once in `LOG_INTERVAL_S`.

    `offset`: first byte; a negative one counts from the end.
    `pod`: pod to read it on; None for the one that the registry names.

    Raises:
        NotFoundError: If there is no such run.
    """
    found = find_run(operator, run_id, pod=pod)
    report = found.report
    position = offset if offset >= 0 else max(0, report.log_bytes + offset)
    while True:
        content = _read(found, position)
        if content:
            yield Chunk(content, position)
            position += len(content)
        if len(content) == CHUNK_BYTES and position < report.log_bytes:
            continue
        if not follow or report.state in ENDED:
            return
        operator.clock.sleep(LOG_INTERVAL_S)
        # Asked before the next read: what was written up to the end is then read whole.
        report = probe_run(found.run)


def _read(found: FoundRun, position: int) -> bytes:
    """The next part; nothing while the file is not there yet."""
    path = f"{found.report.run_dir}/training.log"
    try:
        return found.link.transport.tail(path, position, max_bytes=CHUNK_BYTES, timeout_s=QUICK_S)
    except NotFoundError:
        return b""
