"""Ask a running trainer for something: save a checkpoint now, or show its stacks."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.layout import RunDir
from nsa_ops.agents import ask
from nsa_ops.context import Operator
from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError
from nsa_ops.pod.messages import CheckpointFact, RunReport, SignalAction, SignalName
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import LIVE, FoundRun, find_run
from nsa_ops.runs.wait import ENDED, poll

SAVE_S = 120.0
STACK_S = 10.0
_POLL_S = 0.2
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was saved on request."""

    run_id: str
    checkpoint: CheckpointFact
    seconds: float


@dataclass(frozen=True)
class Stacks:
    """Stacks of all threads of a trainer."""

    run_id: str
    text: str


def save_now(operator: Operator, run_id: str | None) -> Saved:
    """Have a checkpoint saved at the next step boundary, and wait until it is whole.

    Raises:
        StateConflictError: If no trainer of the run is alive.
        NotFoundError: If the trainer ended without saving.
        DeadlineError: If none appears in time.
    """
    found = _find_live(operator, run_id)
    before = {fact.name: fact.created_unix_s for fact in found.report.checkpoints if fact.whole}
    began_s = operator.clock.monotonic_s()
    operator.tell(_send(found, "USR2", "save now"))

    def is_new(report: RunReport) -> bool:
        return _newest_new(report, before) is not None or report.state in ENDED

    report = poll(
        operator, found.link, found.record.code_id, found.record.run_id, is_new,
        operator.deadline_s(SAVE_S), "a new checkpoint",
    )  # fmt: skip
    checkpoint = _newest_new(report, before)
    if checkpoint is None:
        message = f"Run `{report.run_id}` ended without saving: {report.why}"
        raise NotFoundError(message, hint=f"See `nsa-ops status {report.run_id}`")
    return Saved(report.run_id, checkpoint, operator.clock.monotonic_s() - began_s)


def _newest_new(report: RunReport, before: dict[str, float | None]) -> CheckpointFact | None:
    for fact in report.checkpoints:
        if fact.whole and before.get(fact.name, "none") != fact.created_unix_s:
            return fact
    return None


def dump_stacks(operator: Operator, run_id: str | None) -> Stacks:
    """Have the trainer write the stacks of all its threads, and read them.

    Raises:
        StateConflictError: If no trainer of the run is alive.
        DeadlineError: If nothing was written in time.
    """
    found = _find_live(operator, run_id)
    path = str(RunDir(Path(found.report.run_dir)).stack_dump())
    before = len(_read(found, path, 0))
    operator.tell(_send(found, "USR1", "stacks"))
    deadline_s = operator.clock.monotonic_s() + operator.deadline_s(STACK_S)
    text = b""
    while operator.clock.monotonic_s() < deadline_s:
        operator.clock.sleep(_POLL_S)
        latest = _read(found, path, before)
        if latest and latest == text:
            return Stacks(found.record.run_id, text.decode(errors="replace"))
        text = latest
    message = f"Run `{found.record.run_id}` wrote no stacks within {STACK_S:g} s"
    raise DeadlineError(message, hint=f"See `nsa-ops status {found.record.run_id}`")


def _find_live(operator: Operator, run_id: str | None) -> FoundRun:
    found = find_run(operator, run_id, among=LIVE)
    report = found.report
    if report.state not in LIVE:
        message = f"Run `{report.run_id}` has no trainer to ask: {report.state}, {report.why}"
        raise StateConflictError(message, hint=f"See `nsa-ops status {report.run_id}`")
    return found


def _send(found: FoundRun, signal: SignalName, reason: str) -> str:
    action = SignalAction(
        run_dir=Path(found.report.run_dir),
        attempt=found.report.manifest.attempt,
        signal=signal,
        reason=reason,
    )
    return ask(found.link, found.record.code_id, action).message


def _read(found: FoundRun, path: str, offset: int) -> bytes:
    try:
        return found.link.transport.tail(path, offset, max_bytes=_MAX_BYTES, timeout_s=QUICK_S)
    except NotFoundError:
        return b""
