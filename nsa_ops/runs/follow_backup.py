"""Follow a run with its backup: each new checkpoint once it is whole, until the run has ended."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nsa_ops.agents import probe_run
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.pull import bring, plan_pull
from nsa_ops.backup.receipts import at_most_lost, newest_held
from nsa_ops.backup.retention import RetentionPolicy, plan_prune_here, prune_here
from nsa_ops.backup.transfer import Problem, Pulled
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import (
    DeadlineError,
    NotFoundError,
    PartialError,
    PodUnreachableError,
    VerificationError,
)
from nsa_ops.pod.messages import RunReport
from nsa_ops.runs.choose import handle_of
from nsa_ops.runs.status import current_step, receipts_of_report
from nsa_ops.runs.wait import ENDED, TELL_EVERY_S
from nsa_ops.store import RunRecord

INTERVAL_S = 2.0


@dataclass(frozen=True)
class PullRequest:
    """What is pulled, and what is kept of it.

    Attributes:
        which: Checkpoints of the first pull: `latest`, `all`, `none` or a step.
        policy: What is kept of the backup; None keeps all.
    """

    run: RunRecord
    folder: BackupFolder
    which: str
    policy: RetentionPolicy | None = None


def pull_once(
    operator: Operator, link: PodLink, asked: PullRequest, newer_than: int | None = None
) -> Pulled:
    """One verified pull, and then what the policy says if nothing failed; see `Pulled.failure`.

    Checkpoints after the step `newer_than` are pulled too.
    """
    run_id, folder = asked.run.run_id, asked.folder
    planned = plan_pull(
        link, run_id, folder, asked.which, newer_than=newer_than, policy=asked.policy
    )
    pulled = bring(operator, link, planned)
    if asked.policy is not None and pulled.failure is None:
        pruning = plan_prune_here(operator, folder, run_id, asked.policy)
        if pruning.plan.changes:
            steps = prune_here(operator, folder, pruning).removed_steps
            operator.tell(f"removed here: checkpoints of steps {', '.join(map(str, steps))}")
    return pulled


def follow_pull(operator: Operator, link: PodLink, asked: PullRequest) -> Iterator[Pulled]:
    """Pull, look every two seconds, pull again when there is something new; one item a pull.

    A lost link is reported and tried again; it changes nothing about the run, and a part that has
    arrived is continued. What changed while it was read is brought the next time.

    Raises:
        PodUnreachableError, DeadlineError: If the very first look fails.
        LocalResourceError: If this machine's disk is full.
        OpsError: If the run has ended and something still was not brought; see `Pulled.failure`.
    """
    follower = _Follower(operator, link, asked)
    while not follower.is_done:
        pulled = follower.look()
        if pulled is not None:
            yield pulled
            if follower.is_done and pulled.failure is not None:
                raise pulled.failure
        if not follower.is_done:
            operator.clock.sleep(INTERVAL_S)


class _Follower:
    """One backup that follows one run."""

    def __init__(self, operator: Operator, link: PodLink, asked: PullRequest) -> None:
        self._operator = operator
        self._link = link
        self._asked = asked
        self._seen: int | None = None
        self._has_looked = False
        self._told_s = operator.clock.monotonic_s()
        self._problems: list[Problem] = []
        self.is_done = False

    def look(self) -> Pulled | None:
        """One look at the run, and a pull if there is something to bring."""
        run = self._asked.run
        try:
            report = probe_run(handle_of(self._link, run))
            self._has_looked = True
            has_ended = report.state in ENDED
            self._tell(report)
            if not has_ended and not self._has_new(report):
                return None
            return self._pull(report, has_ended=has_ended)
        except (PodUnreachableError, DeadlineError) as error:
            if not self._has_looked:
                raise
            self._operator.tell(f"{error.message}; trying again; the run is not affected")
            return None

    def _has_new(self, report: RunReport) -> bool:
        return self._seen is None or any(
            fact.whole and fact.step > self._seen for fact in report.checkpoints
        )

    def _pull(self, report: RunReport, *, has_ended: bool) -> Pulled | None:
        newest = max((fact.step for fact in report.checkpoints if fact.whole), default=0)
        try:
            pulled = pull_once(self._operator, self._link, self._asked, self._seen)
        except (PartialError, NotFoundError, VerificationError) as error:
            if has_ended:
                raise
            self._operator.tell(f"{error.message}; it is brought with the next pull")
            return None
        self.is_done = has_ended
        if not has_ended and self._is_to_repeat(pulled):
            return None
        if self._seen is None:
            self._asked, self._seen = replace(self._asked, which="none"), newest
        self._seen = max([self._seen, *pulled.pulled_steps, *pulled.present_steps])
        return pulled

    def _is_to_repeat(self, pulled: Pulled) -> bool:
        """Whether something failed that may come with the next look, and not the same again."""
        before, self._problems = self._problems, pulled.problems
        if pulled.failure is None or pulled.problems == before:
            return False
        self._operator.tell(f"{pulled.failure.message}; the next pull tries it again")
        return True

    def _tell(self, report: RunReport) -> None:
        """A line every 10 s: how far the run is, and what a lost pod would cost."""
        now_s = self._operator.clock.monotonic_s()
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        step = current_step(report)
        saved = newest_held(receipts_of_report(self._operator, report))
        step_s = report.last_beat.step_s if report.last_beat else None
        at_risk = at_most_lost(last_step=step, saved=saved, step_s=step_s)
        where = f"step {step:,} of {report.manifest.steps:,}"
        self._operator.tell(f"{report.state}, {where}; {at_risk.sentence}")
