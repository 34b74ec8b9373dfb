"""Start an attempt on several pods, all or none: if one fails, the others are stopped."""

from collections.abc import Sequence
from pathlib import Path

from nsa_ops.agents import ask, ask_each, probe_run
from nsa_ops.context import Operator, RunHandle
from nsa_ops.errors import DeadlineError, OpsError, PodUnreachableError
from nsa_ops.pod.messages import RunReport, SignalAction, SignalName
from nsa_ops.runs.attempt import (
    FIRST_BEAT_S,
    Arrival,
    AttemptStart,
    FirstBeat,
    begun,
    did_not_come_up,
    watch_again,
)
from nsa_ops.runs.choose import LIVING
from nsa_ops.runs.members import MemberReport, choose_culprit, merge
from nsa_ops.runs.wait import ENDED, POLL_S, describe_progress
from nsa_ops.runs.windows import start_session

#: Signals to what must not go on alone, and how long each may take.
LADDER: tuple[tuple[SignalName, float], ...] = (("TERM", 20.0), ("KILL", 15.0))


class LateStartError(DeadlineError):
    """The attempt did not come up on all pods in time."""


def start_fleet(operator: Operator, start: AttemptStart) -> FirstBeat:
    """Start what was planned; repeated after a cut, it continues where it stopped.

    Raises:
        StateConflictError: If another command starts or moves the run, or did since the plan.
        OpsError: If a pod does not come up: it is named with its last words, and all are stopped.
    """
    with begun(operator, start) as before:
        if start.may_be_started and _was_started(before):
            watch_again(operator, start, before)
            return FirstBeat(_merged(start.runs, before), None)
        started_s = operator.clock.monotonic_s()
        try:
            for run, report in zip(start.runs, before, strict=True):
                if report.state == "planned":
                    start_session(run, start.module)
            names = ", ".join(run.pod for run in start.runs)
            operator.tell(f"started {run.run_id} on {names}; waiting until all are up")
            return _await_all(operator, start.runs, before, started_s)
        except OpsError as error:
            if not _is_lost_link(error):
                _stop_after(operator, start.runs, error)
            raise


def _is_lost_link(error: OpsError) -> bool:
    """Our own link changes nothing about a run: a repeat finds what was started."""
    is_slow = isinstance(error, DeadlineError) and not isinstance(error, LateStartError)
    return is_slow or isinstance(error, PodUnreachableError)


def _was_started(reports: Sequence[RunReport]) -> bool:
    """Nothing is left to start, or something has ended already."""
    states = [report.state for report in reports]
    return "planned" not in states or any(state in ENDED for state in states)


def _merged(runs: Sequence[RunHandle], reports: Sequence[RunReport]) -> RunReport:
    members = _members(runs, reports)
    return merge(reports[0], runs[0].pod, members[1:]) if len(runs) > 1 else reports[0]


def _members(runs: Sequence[RunHandle], reports: Sequence[RunReport]) -> list[MemberReport]:
    pairs = enumerate(zip(runs, reports, strict=True))
    return [MemberReport(run.pod, rank, report) for rank, (run, report) in pairs]


def _await_all(
    operator: Operator,
    runs: Sequence[RunHandle],
    before: Sequence[RunReport],
    started_s: float,
) -> FirstBeat:
    """Wait until the attempt is up on every pod; see `await_first_beat`."""
    clock, deadline_s = operator.clock, operator.deadline_s(FIRST_BEAT_S)
    arrivals = [Arrival(run, clock.monotonic_s()) for run in runs]
    with operator.work("waiting for the start on all pods") as work:
        while True:
            reports = ask_each(runs, probe_run)
            ended = [one for one in _members(runs, reports) if one.state in ENDED - {"finished"}]
            if ended:
                raise _failed(operator, runs, before, choose_culprit(ended))
            is_up = [
                one.look(report, clock.monotonic_s()) or report.state == "finished"
                for one, report in zip(arrivals, reports, strict=True)
            ]
            if all(is_up):
                beats = [one.beat_s for one in arrivals if one.beat_s is not None]
                last_s = max(beats, default=clock.monotonic_s())
                return FirstBeat(_merged(runs, reports), last_s - started_s)
            if clock.monotonic_s() - started_s >= deadline_s:
                raise _late(runs, reports, is_up, deadline_s)
            work.detail = describe_progress(reports[0])
            clock.sleep(POLL_S)


def _failed(
    operator: Operator,
    runs: Sequence[RunHandle],
    before: Sequence[RunReport],
    culprit: MemberReport,
) -> OpsError:
    run, report = runs[culprit.node_rank], culprit.report
    if report is None:  # it has ended, so it was seen
        raise AssertionError(culprit)
    error = did_not_come_up(operator, run, report, before[culprit.node_rank].log_bytes)
    hint = f"See it all with `nsa-ops logs {run.run_id} --pod {run.pod}`"
    return type(error)(f"Pod `{run.pod}`: {error.message}", hint=hint)


def _late(
    runs: Sequence[RunHandle], reports: Sequence[RunReport], is_up: Sequence[bool], limit_s: float
) -> LateStartError:
    slow = ", ".join(
        f"`{run.pod}` is {report.state} ({report.why})"
        for run, report, up in zip(runs, reports, is_up, strict=True)
        if not up
    )
    message = f"Waited {limit_s:g} s for the start of `{runs[0].run_id}` on all pods; pod {slow}"
    hint = f"Look at `nsa-ops status {runs[0].run_id}` and `nsa-ops logs {runs[0].run_id}`"
    return LateStartError(message, hint=hint)


def _stop_after(operator: Operator, runs: Sequence[RunHandle], cause: OpsError) -> None:
    """All or none: what was started is ended; a pod that cannot be asked is named."""
    why = f"the attempt did not come up on all pods: {cause.message}"
    for run in runs:
        try:
            signals = stop_share(operator, run, why)
        except OpsError as error:
            operator.tell(f"pod {run.pod} may still run its part: {error.message}")
        else:
            if signals:
                operator.tell(f"pod {run.pod} was stopped with {' and '.join(signals)}")


def stop_share(
    operator: Operator,
    run: RunHandle,
    reason: str,
    ladder: Sequence[tuple[SignalName, float]] = LADDER,
) -> list[str]:
    """End what lives of a run on one pod: TERM, then KILL; the signals that were sent.

    Raises:
        DeadlineError: If it lives on after the last one.
        OpsError: If the pod cannot be asked.
    """
    signals: list[str] = []
    for name, wait_s in ladder:
        if probe_run(run).state not in LIVING:
            return signals
        ask(run, SignalAction(run_dir=Path(str(run.run_dir)), signal=name, reason=reason))
        signals.append(name)
        end_s = operator.clock.monotonic_s() + wait_s
        while operator.clock.monotonic_s() < end_s:
            if probe_run(run).state not in LIVING:
                return signals
            operator.clock.sleep(POLL_S)
    message = f"Run `{run.run_id}` still lives on pod `{run.pod}` after {' and '.join(signals)}"
    raise DeadlineError(message, hint=f"See `nsa-ops status {run.run_id} --pod {run.pod}`")
