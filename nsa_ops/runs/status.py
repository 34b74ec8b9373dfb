"""Status: what runs are doing now, derived from what their pods show, and never stored."""

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.rundir.bounded_json import parse_records
from nsa_core.rundir.events import Event
from nsa_ops.backup.receipts import AtMostLost, at_most_lost, newest_held, receipts_of, still_ahead
from nsa_ops.context import Operator
from nsa_ops.errors import HaltVerdictError, VerificationError
from nsa_ops.pod.messages import RunReport
from nsa_ops.pods.known import choose_pod
from nsa_ops.quantities import format_bytes
from nsa_ops.remote.transport import QUICK_S, OversizeError
from nsa_ops.runs.choose import PodRuns, find_run, look_among, look_at_pods
from nsa_ops.store import Receipt, RunRecord

#: The most of events.jsonl that is brought, 1.3 million events, and in one round trip.
MAX_EVENTS_BYTES, _EVENTS_AT_ONCE = 256 * 2**20, 8 * 2**20
#: Beginning of a pod's flag that explains why there are no events; see `JsonLines.problem`.
_UNREADABLE = "events.jsonl cannot be read"

#: `status --exit-code`
FAILED, RUNNING, HALTED_BY_WATCHDOG, LOST, CANCELLED = 20, 21, 22, 23, 24


@dataclass(frozen=True)
class RunStatusLine:
    """A run as `run ls` and `status` show it.

    Attributes:
        report: What its pod shows; None if the pod could not be asked.
        problem: Why there is no report.
        at_risk: What would be lost with the pod; None if unknown.
    """

    record: RunRecord
    report: RunReport | None
    problem: str = ""
    at_risk: AtMostLost | None = None

    @property
    def state(self) -> str:
        """The derived state; `unreachable` says nothing about the run."""
        return self.report.state if self.report is not None else "unreachable"


def list_runs(operator: Operator, pod: str | None = None) -> list[RunStatusLine]:
    """Every run that was launched from here, newest first; one round trip a pod.

    Raises:
        NotFoundError: If a pod is named that is not known and never had a run.
    """
    runs = operator.store.runs(pod)
    if pod is not None and not runs:
        choose_pod(operator.store, pod)
    looked = look_at_pods(operator, runs)
    return [_line_among(operator, run, looked) for run in runs]


def _line_among(operator: Operator, run: RunRecord, looked: Sequence[PodRuns]) -> RunStatusLine:
    found = look_among(run, looked)
    if found.report is None:
        return RunStatusLine(run, None, found.problem)
    return status_line(operator, run, found.report)


def status_line(operator: Operator, run: RunRecord, report: RunReport) -> RunStatusLine:
    """A run with what a loss of its pod would cost."""
    return RunStatusLine(run, report, "", at_risk_of(operator, report))


def at_risk_of(operator: Operator, report: RunReport) -> AtMostLost:
    """What a loss of its pod would cost a run."""
    return at_most_lost(
        last_step=current_step(report),
        saved=newest_held(receipts_of_report(operator, report)),
        step_s=report.last_beat.step_s if report.last_beat else None,
    )


def receipts_of_report(operator: Operator, report: RunReport) -> list[Receipt]:
    """Receipts of the lineage that the pod shows, of what it has not gone back behind since.

    Those of another one, or of steps that were abandoned, save nothing of it.
    """
    manifest = report.manifest
    known = operator.store.receipts(report.run_id)
    ours = receipts_of(known, manifest.attempt, manifest.attempt_id)
    return still_ahead(ours, report.beginnings)


def current_step(report: RunReport) -> int:
    """Optimizer steps done as far as the pod shows."""
    beat = report.last_beat.step if report.last_beat else 0
    saved = max((fact.step for fact in report.checkpoints if fact.whole), default=0)
    return max(beat, report.exit.step if report.exit else 0, saved if beat == 0 else 0)


def find_status(operator: Operator, run_id: str | None, pod: str | None = None) -> RunStatusLine:
    """One run; on a named pod where one is named, though the registry may name another."""
    found = find_run(operator, run_id, pod=pod)
    return status_line(operator, found.record, found.report)


def exit_code_of(report: RunReport) -> int:
    """What `status --exit-code` ends with; 0 is finished."""
    if report.state == "finished":
        return 0
    if report.state == "failed":
        return FAILED
    if report.state in {"lost", "preempted"}:
        return LOST
    if report.state == "halted":
        by_watchdog = report.halt is not None and report.halt.by == "watchdog"
        return HALTED_BY_WATCHDOG if by_watchdog else CANCELLED
    return RUNNING


def halt_verdict(run: RunStatusLine) -> HaltVerdictError | None:
    """The finding of the rule that halts a run, as an error; None without one."""
    if run.report is None or run.report.verdict.level != "halt":
        return None
    verdict = run.report.verdict
    hint = f"See `{verdict.rule}` in docs/watchdog.md and `nsa-ops status {run.record.run_id}`"
    return HaltVerdictError(f"`{verdict.rule}` halts: {verdict.sentence}", hint=hint)


def list_events(operator: Operator, run_id: str | None, *, whole: bool = False) -> list[Event]:
    """What happened to a run, oldest first: the newest part of it, or all.

    `whole`: read the whole file, a round trip for every 8 MiB.

    Raises:
        NotFoundError: If there is no such run.
        VerificationError: If its events cannot be read.
        OversizeError: If the whole file is longer than any run's.
    """
    found = find_run(operator, run_id)
    report = found.report
    unreadable = [flag for flag in report.flags if flag.startswith(_UNREADABLE)]
    if unreadable:
        message = f"No events of `{report.run_id}`: {unreadable[0]}"
        hint = "Look at it on the pod; the next attempt moves it aside and begins a new one"
        raise VerificationError(message, hint=hint)
    if report.events_begin == 0:
        return report.events
    if not whole:
        before = format_bytes(report.events_begin)
        operator.tell(f"{before} of earlier events are left out; `--all` reads them too")
        return report.events
    if report.events_offset > MAX_EVENTS_BYTES:
        size, limit = format_bytes(report.events_offset), format_bytes(MAX_EVENTS_BYTES)
        message = f"events.jsonl of `{report.run_id}` has {size}; at most {limit} are read"
        raise OversizeError(message)
    events: list[Event] = []
    offset = 0
    while offset < report.events_offset:
        content = found.link.transport.tail(
            f"{report.run_dir}/events.jsonl", offset, max_bytes=_EVENTS_AT_ONCE, timeout_s=QUICK_S
        )
        read = parse_records(content, Event, offset)
        events += read.records
        is_too_long = read.offset == offset and len(content) == _EVENTS_AT_ONCE
        offset = offset + len(content) if is_too_long else read.offset
        if not content or offset == read.begin:
            break  # shorter than it was, or its last line is not whole yet
    return events
