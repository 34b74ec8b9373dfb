"""A backup that follows its run: each checkpoint once, over a bad link, until the end."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import list_checkpoints
from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.retention import RetentionPolicy
from nsa_ops.backup.transfer import Pulled
from nsa_ops.errors import PodUnreachableError
from nsa_ops.pod.probe import probe
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed
from nsa_ops.runs.follow_backup import PullRequest, follow_pull
from nsa_ops.store import RunRecord
from tests.ops.backup.case import RUN_ID, Case, CutLink
from tests.ops.fakes import completed

RECORD = RunRecord(RUN_ID, "here", "tiny-cpu", "cpu", "code", "c" * 64, 1.0)


class LivePod(CutLink):
    """A pod whose agent answers; before each look the next thing happens to its run."""

    def __init__(self, run: RunDir, *happenings: Callable[[], object]) -> None:
        super().__init__(10**9)
        self._run = run
        self._happenings = list(happenings)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        if "nsa_ops.pod.probe" not in argv:
            return super().run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
        if self._happenings:
            self._happenings.pop(0)()
        return completed(probe(self._run.root.parent, [RUN_ID], {}).model_dump_json())


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def follow(case: Case, pod: LivePod, which: str = "latest", **more: object) -> list[Pulled]:
    asked = PullRequest(RECORD, case.backup, which, **more)  # type: ignore[arg-type]
    return list(follow_pull(case.operator, case.link(pod), asked))


def nothing() -> None:
    """Time goes by."""


def dead() -> None:
    message = "The link to the pod was lost"
    raise PodUnreachableError(message)


def test_each_new_checkpoint_is_brought_once_and_the_end_ends_it(case: Case) -> None:
    builder = case.build(20, 40)

    def go_on() -> None:
        builder.train(40, 60, every=5).save(60)

    def end() -> None:
        builder.train(60, 80, every=5).save(80).end(0, "all steps done", 80)

    pulls = follow(case, LivePod(case.run, nothing, nothing, go_on, nothing, end))
    assert [pull.pulled_steps for pull in pulls] == [[40], [60], [80]]
    assert [one.step for one in list_checkpoints(case.backup.run)] == [80, 60, 40]
    assert (case.backup.root / "exit.json").exists()
    assert pulls[-1].at_risk.steps == 0


def test_a_lost_link_is_told_and_what_came_meanwhile_is_brought(case: Case) -> None:
    builder = case.build(20)

    def end() -> None:
        for step in (40, 60):
            builder.train(step - 20, step, every=5).save(step)
        builder.end(10, "halted", 60)

    pulls = follow(case, LivePod(case.run, nothing, dead, dead, end))
    assert [pull.pulled_steps for pull in pulls] == [[20], [60, 40]]
    assert sum("trying again; the run is not affected" in line for line in case.told) == 2


def test_a_link_that_dies_in_a_pull_is_continued(case: Case) -> None:
    builder = case.build(20)

    def grow() -> None:
        builder.train(20, 40, every=5).save(40)
        pod.budget = 900

    def heal() -> None:
        pod.budget = 10**9
        builder.end(0, "done", 40)

    pod = LivePod(case.run, nothing, grow, heal)
    assert [pull.pulled_steps for pull in follow(case, pod)] == [[20], [40]]
    assert any("trying again" in line for line in case.told)


def test_a_pod_that_never_answered_is_an_error(case: Case) -> None:
    case.build(20)
    with pytest.raises(PodUnreachableError):
        follow(case, LivePod(case.run, dead))


def test_a_quiet_run_is_told_of_every_ten_seconds(case: Case) -> None:
    builder = case.build(20)
    quiet = [nothing] * 12
    follow(case, LivePod(case.run, *quiet, lambda: builder.end(0, "done", 20)))
    told = [line for line in case.told if "step 20 of" in line]
    assert len(told) == 2
    assert "you lose nothing: the newest verified backup is step 20" in told[0]


def test_a_policy_keeps_the_backup_small_while_it_follows(case: Case) -> None:
    builder = case.build(20, 40, 60)
    end = lambda: builder.train(60, 80, every=5).save(80).end(0, "done", 80)  # noqa: E731 (a happening)
    follow(case, LivePod(case.run, nothing, end), which="all", policy=RetentionPolicy(1, 40))
    assert [one.step for one in list_checkpoints(case.backup.run)] == [80, 40]
    assert {one.step for one in case.operator.store.receipts(RUN_ID)} == {80, 40}
