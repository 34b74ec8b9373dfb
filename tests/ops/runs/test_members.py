"""What the pods of a run show together: one state, which pod is lost, and what each adds."""

from dataclasses import replace
from typing import Any

import pytest

from nsa_ops.errors import PodUnreachableError
from nsa_ops.pod.messages import RunReport
from nsa_ops.pod.rank_ending import LOST_ELSEWHERE
from nsa_ops.pod.rules.verdict import Finding, Verdict, conclude
from nsa_ops.runs.choose import find_run
from nsa_ops.runs.members import MemberReport, merge
from nsa_ops.runs.status import list_runs
from nsa_ops.runs.watch import watch
from nsa_ops.settings import Settings
from nsa_ops.store import MemberPod, PodRecord
from tests.ops.fakes import FakeTransport
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, Sequence, answer, ended, report

OTHER = PodRecord("b", "pod-b", "local", "/b", "python3", "cpu", 0.0)
SEVERAL = replace(RUN, pod_id="pod-1").with_others([MemberPod("b", "pod-b")])


def merged(first: str, other: str | None, **fields: Any) -> RunReport:
    shown = report(other, **fields) if other else None
    problem = "" if other else "b does not answer"
    return merge(report(first), "a", [MemberReport("b", 1, shown, problem)])


@pytest.mark.parametrize(
    ("first", "other", "state"),
    [
        ("running", "running", "running"),
        ("staging", "staging", "staging"),
        ("planned", "planned", "planned"),
        ("running", None, "running"),
        ("running", "planned", "starting"),
        ("planned", "starting", "starting"),
        ("halting", "halting", "halting"),
        ("halted", "running", "halting"),
        ("running", "lost", "halting"),
        ("halted", "halted", "halted"),
        ("halted", "lost", "lost"),
        ("failed", "lost", "failed"),
        ("finished", "finished", "finished"),
        ("finished", None, "finished"),
    ],
)
def test_a_run_runs_as_long_as_all_its_pods_do(first: str, other: str | None, state: str) -> None:
    assert merged(first, other).state == state


def test_a_lost_pod_is_named_with_its_evidence() -> None:
    found = merged("running", "lost")
    assert found.why == "pod `b` is lost: it is lost; the others end: `a` (running)"
    assert [(one.pod, one.node_rank, one.state) for one in found.pods] == [
        ("a", 0, "running"), ("b", 1, "lost"),
    ]  # fmt: skip


def test_a_pod_that_does_not_answer_is_a_flag_and_no_state() -> None:
    found = merged("running", None)
    assert found.flags == ["pod `b` says nothing: b does not answer"]
    assert found.why == "it is running"


def test_the_pod_that_only_followed_is_not_the_culprit() -> None:
    follower = report("failed", exit=ended(1, f"{LOST_ELSEWHERE}; rank 0 of 2: broken pipe"))
    culprit = report("failed", exit=ended(13, "out of memory"))
    found = merge(follower, "a", [MemberReport("b", 1, culprit)])
    assert (found.state, found.why) == ("failed", "pod `b` is failed: it is failed")
    assert merge(culprit, "a", [MemberReport("b", 1, follower)]).why == "it is failed"


def test_a_pod_at_another_attempt_says_nothing_about_this_one() -> None:
    behind = report("halted")
    ahead = report("running", manifest=behind.manifest.model_copy(update={"attempt": 2}))
    found = merge(ahead, "a", [MemberReport("b", 1, behind)])
    assert (found.state, found.pods[1].state) == ("running", None)
    assert "it is at attempt 1, and pod 0 at 2" in found.flags[0]


def test_the_worst_verdict_counts_and_says_on_which_pod() -> None:
    bad = Verdict(level="halt", rule="stall", sentence="rank 1 is stuck")
    found = merged("running", "running", verdict=bad)
    assert (found.verdict.level, found.verdict.sentence) == ("halt", "pod `b`: rank 1 is stuck")
    assert merged("running", "running").verdict.sentence == report().verdict.sentence


def test_what_the_rules_found_on_all_pods_is_shown_the_worst_first() -> None:
    here = Verdict(level="warn", rule="data_slow", sentence="batches are slow")
    there = conclude(
        [
            Finding(rule="disk_low", level="warn", sentence="the disk is full"),
            Finding(rule="stall", level="halt", sentence="rank 3 is stuck"),
        ]
    )
    found = merge(report(verdict=here), "a", [MemberReport("b", 1, report(verdict=there))]).verdict
    assert (found.level, found.rule) == ("halt", "stall")
    assert [one.sentence for one in found.findings] == [
        "pod `b`: rank 3 is stuck", "batches are slow", "pod `b`: the disk is full",
    ]  # fmt: skip


@pytest.fixture
def both(desk: Desk) -> dict[str, FakeTransport]:
    """Two pods with one run; each answers by itself."""
    desk.store.add_pod(OTHER)
    desk.store.save_run(SEVERAL)
    return {POD.name: FakeTransport(), "b": FakeTransport()}


def test_a_run_is_found_with_all_its_pods(desk: Desk, both: dict[str, FakeTransport]) -> None:
    operator = replace(desk.operator, connect=lambda pod, _settings: both[pod.name])
    both[POD.name].answers["nsa_ops.pod.probe"] = answer(report("running"))
    both["b"].answers["nsa_ops.pod.probe"] = answer(report("lost"))
    assert find_run(operator, "r1").report.state == "halting"
    assert find_run(operator, "r1", pod=POD.name).report.state == "running"
    (line,) = list_runs(operator)
    assert line.state == "halting"
    assert [run.record.run_id for run in list_runs(operator, "b")] == ["r1"]


def test_watch_opens_one_link_a_pod_however_often_it_looks(
    desk: Desk, both: dict[str, FakeTransport]
) -> None:
    opened: list[str] = []

    def connect(pod: PodRecord, _settings: Settings) -> FakeTransport:
        opened.append(pod.name)
        return both[pod.name]

    going, done = answer(report("running")), answer(report("finished"))
    for transport in both.values():
        transport.answers["nsa_ops.pod.probe"] = Sequence(going, going, done)
    frames = list(watch(replace(desk.operator, connect=connect), "r1"))
    assert [frame.report.state for frame in frames] == ["running", "running", "finished"]
    assert opened == [POD.name, "b"]


def test_where_pod_0_does_not_answer_the_others_are_told(
    desk: Desk, both: dict[str, FakeTransport]
) -> None:
    operator = replace(desk.operator, connect=lambda pod, _settings: both[pod.name])
    both[POD.name].answers["nsa_ops.pod.probe"] = PodUnreachableError("gone")
    both["b"].answers["nsa_ops.pod.probe"] = answer(report("running"))
    with pytest.raises(PodUnreachableError):
        find_run(operator, "r1")
    assert desk.story == ["pod b, pod 1 of `r1`: running"]


def test_a_recycled_pod_is_no_member(desk: Desk, both: dict[str, FakeTransport]) -> None:
    operator = replace(desk.operator, connect=lambda pod, _settings: both[pod.name])
    desk.store.replace_pod(replace(OTHER, pod_id="pod-new"))
    both[POD.name].answers["nsa_ops.pod.probe"] = answer(report("running"))
    found = find_run(operator, "r1").report
    assert "another machine by now" in found.flags[0]
    assert both["b"].asked == []
