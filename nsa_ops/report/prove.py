"""Prove a resume: continue from an older checkpoint, compare the losses of the steps done twice."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.layout import RunDir
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import ConfigurationError, NotFoundError, VerificationError
from nsa_ops.pod.messages import RunReport
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.report.record import parse_lines
from nsa_ops.runs.choose import FoundRun, find_run
from nsa_ops.runs.resume import Resumed, ResumePlan
from nsa_ops.runs.wait import ENDED, poll

_MAX_CSV_BYTES = 64 * 1024 * 1024
REPLAY_S = 3600.0
_STEP = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class RepeatedLosses:
    """Losses of the same steps in two attempts.

    Attributes:
        num_different: Steps whose losses differ in any digit.
        difference: The first of them in one line; empty if there is none.
    """

    first_step: int
    last_step: int
    num_compared: int
    num_different: int
    difference: str

    @property
    def is_exact(self) -> bool:
        """Something was compared, and every loss has the same digits."""
        return self.num_compared > 0 and self.num_different == 0


@dataclass(frozen=True)
class ProvenResume:
    """A resume whose repeated steps came out the same."""

    resumed: Resumed
    replay: RepeatedLosses


def last_step_of(report: RunReport) -> int:
    """Last step of an attempt that ended, by its exit record or else its last heartbeat."""
    if report.exit is not None:
        return report.exit.step
    return report.last_beat.step if report.last_beat else 0


def choose_replay(found: FoundRun) -> str:
    """Folder of the newest checkpoint that leaves recorded steps to be done again."""
    report = found.report
    recorded = last_recorded(_read_training_csv(found), last_step_of(report))
    older = [one for one in report.checkpoints if one.step < recorded and one.whole]
    if not older:
        what = f"its last recorded step {recorded}" if recorded else "a recorded step: it has none"
        message = f"Run `{report.run_id}` has no checkpoint before {what}"
        hint = (
            "Resume it without `--prove`; to prove a later resume, record every step "
            "(`telemetry.log_every=1`) or save more often (`checkpoint.save_every`)"
        )
        raise NotFoundError(message, hint=hint)
    newest = max(older, key=lambda one: one.step)
    return f"{report.run_dir}/checkpoints/{newest.name}"


def _read_training_csv(found: FoundRun) -> str:
    """training.csv on the pod; empty if the run never recorded a step."""
    path = RunDir(Path(found.report.run_dir)).training_csv
    try:
        return _read_text(found.link, path)
    except NotFoundError:
        return ""


def _read_text(link: PodLink, file: Path) -> str:
    """A table of a run on the pod."""
    content = link.transport.tail(str(file), 0, max_bytes=_MAX_CSV_BYTES, timeout_s=QUICK_S)
    return content.decode(errors="replace")


def last_recorded(training_csv: str, last_step: int) -> int:
    """The last step up to `last_step` with a whole row in training.csv, 0 without one; pure.

    A row that a kill has cut does not count: the next attempt drops it.
    """
    return max((step for step in _read_losses(training_csv) if step <= last_step), default=0)


def find_replay(operator: Operator, run_id: str | None, *, path: str, sets: Sequence[str]) -> str:
    """Folder of the checkpoint from which a proof of this run continues.

    Raises:
        ConfigurationError: If the operator chose a checkpoint or changed a value.
        NotFoundError: As `choose_replay`.
    """
    if path or sets:
        message = "`--prove` chooses the checkpoint itself and changes no value"
        raise ConfigurationError(message, hint="Leave out `--from` and `--set`")
    return choose_replay(find_run(operator, run_id, among=ENDED))


def compare_losses(
    before_csv: str, again_csv: str, *, from_step: int, to_step: int
) -> RepeatedLosses:
    """Compare the losses that an attempt repeated with those recorded before it; pure.

    `before_csv`: rows of training.csv that the new attempt put aside.
    """
    before, again = _read_losses(before_csv), _read_losses(again_csv)
    both = sorted(before.keys() & again.keys())
    steps = [step for step in both if from_step < step <= to_step]
    different = [step for step in steps if before[step] != again[step]]
    line = ""
    if different:
        step = different[0]
        line = f"step {step}: loss {before[step]} before and {again[step]} again"
    return RepeatedLosses(
        first_step=steps[0] if steps else from_step,
        last_step=steps[-1] if steps else from_step,
        num_compared=len(steps),
        num_different=len(different),
        difference=line,
    )


def _read_losses(training_csv: str) -> dict[int, str]:
    """Loss of each step that has a whole row, digits as written."""
    whole, _, _torn = training_csv.rpartition("\n")
    rows = [row for row in parse_lines(whole) if "loss" in row]
    return {int(row["step"]): row["loss"] for row in rows if _STEP.fullmatch(row.get("step", ""))}


def await_replay(operator: Operator, planned: ResumePlan, resumed: Resumed) -> ProvenResume:
    """Wait until a resumed run has passed its old last step, then compare; the run goes on.

    `planned`: A resume from the checkpoint that `choose_replay` names.

    Raises:
        VerificationError: If a loss differs, or no step was recorded twice.
        DeadlineError: If the run does not get there in time.
    """
    run, link = planned.found.record, planned.found.link
    first, last = resumed.from_step, last_step_of(planned.found.report)

    def has_passed(report: RunReport) -> bool:
        beat = report.last_beat
        return report.state in ENDED or (beat is not None and beat.step > last)

    deadline_s = operator.deadline_s(REPLAY_S)
    report = poll(operator, planned.found.run, has_passed, deadline_s, f"step {last}")
    run_dir = RunDir(Path(report.run_dir))
    before, again = (
        _read_text(link, file)
        for file in (
            run_dir.replayed(resumed.attempt - 1, run_dir.training_csv),
            run_dir.training_csv,
        )
    )
    replay = compare_losses(before, again, from_step=first, to_step=last)
    if not replay.is_exact:
        what = replay.difference or f"no step in {first + 1}..{last} was recorded twice"
        message = f"The resume of `{run.run_id}` is not exact: {what}"
        hint = "On a card, exact repeats need `runtime.deterministic=true`"
        raise VerificationError(message, hint=hint)
    return ProvenResume(resumed, replay)
