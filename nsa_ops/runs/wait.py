"""Look at a run until something holds, and say meanwhile what it is doing."""

from collections.abc import Callable

from nsa_ops.agents import probe_run
from nsa_ops.context import Operator, RunHandle, Work
from nsa_ops.errors import DeadlineError
from nsa_ops.pod.messages import RunReport

#: A look starts an interpreter on the pod, whose processor may be training.
POLL_S = 1.0
#: How often a long wait says something, and looks closer.
TELL_EVERY_S = 10.0
ENDED = frozenset({"finished", "failed", "halted", "lost", "preempted"})


def poll(
    operator: Operator,
    run: RunHandle,
    is_done: Callable[[RunReport], bool],
    deadline_s: float,
    what: str,
) -> RunReport:
    """Look at a run until something holds; one round trip a look, shown as long work.

    Raises:
        DeadlineError: If it does not hold in time; `what` says what was waited for.
    """
    began_s = operator.clock.monotonic_s()
    with operator.work(f"waiting for {what}") as work:
        while True:
            report = probe_run(run)
            if is_done(report):
                return report
            if operator.clock.monotonic_s() - began_s >= deadline_s:
                message = (
                    f"Waited {deadline_s:g} s for {what} of `{run.run_id}`; "
                    f"it is {report.state} ({report.why})"
                )
                hint = f"Look at `nsa-ops status {run.run_id}` and `nsa-ops logs {run.run_id}`"
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
