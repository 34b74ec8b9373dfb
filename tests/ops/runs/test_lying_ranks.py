"""A pod that lies about ranks: every field of its answer, replaced by what no honest pod says."""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from rich.console import Console

from nsa_ops.agents import probe_run
from nsa_ops.cli.console import envelope
from nsa_ops.cli.render_run import draw_frame, draw_health, draw_status, frame_rows, verdict_rows
from nsa_ops.cli.screen import ScreenLine, styled
from nsa_ops.context import Operator, RunHandle
from nsa_ops.errors import VerificationError
from nsa_ops.pod.messages import PhaseUse, PodShare, RunFigures, RunReport
from nsa_ops.pod.rank_evidence import OwnTime, RankEvidence, rank_spread, slowest_factor
from nsa_ops.pod.rules.verdict import Finding, conclude
from nsa_ops.runs.choose import find_run
from nsa_ops.runs.members import MemberReport, merge
from nsa_ops.runs.status import RunStatusLine
from nsa_ops.runs.watch import Frame
from nsa_ops.store import MemberPod, PodRecord
from tests.ops.fakes import FakeTransport, completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, answer, beat, report

OTHER = PodRecord("b", "pod-b", "local", "/b", "python3", "cpu", 0.0)
SEVERAL = replace(RUN, pod_id="pod-1").with_others([MemberPod("b", "pod-b")])
LIES: dict[str, Any] = {
    "nan": math.nan, "infinite": math.inf, "negative": -1,
    "largest": 1e308, "tiny": 5e-324, "30-digits": 10**30, "minus-4000-digits": -(10**4000),
    "escape": "\x1b[2J\x1b]0;owned\x07\n", "long": "x" * 2**18, "null": None,
    "deep": {"a": {"b": [math.inf]}},
}  # fmt: skip


def ranks(first: int, count: int = 2, **fields: Any) -> tuple[RankEvidence, ...]:
    recent = tuple(OwnTime(step=step, own_s=0.8) for step in range(1, 11))
    given = {
        "msg": "beat", "phase": "train", "step": 100, "beat_age_s": 3.0, "still_s": 1.0,
        "phase_deadline_s": 180.0, "phase_before_s": 10.0, "micro_step": 1, "step_s": 1.0,
        "work_s": 0.8, "sync_s": 0.2, "data_s": 0.0, "own_s": 0.8, "recent": recent,
        "gpu_mem_peak": 30_000, "gpu_mem_reserved": 31_000, "host_rss_mib": 3000, "gpu_util": 97.0,
        "temp_c": 60.0, "throttle": "none",
    }  # fmt: skip
    return tuple(RankEvidence(rank=first + n, **(given | fields)) for n in range(count))


def share(node_rank: int, state: str = "running", **fields: Any) -> RunReport:
    """What one pod of two says, with two ranks on each."""
    summary = report().manifest.model_copy(
        update={"node_rank": node_rank, "num_pods": 2, "ranks_per_pod": 2, "attempt_id": "a" * 32}
    )
    given = {"ranks": ranks(2 * node_rank), "manifest": summary}
    return report(state, **(given | fields))


def outspoken(node_rank: int = 1) -> dict[str, Any]:
    """An answer in which every field has a value."""
    record = beat(100, loss=2.0, step_s=1.0, tokens_per_s=900.0, work_s=0.8, sync_s=0.1)
    use = PhaseUse(phase="train", still_s=1.0, limit_s=180.0, warn_s=60.0, rank=3)
    found = Finding(rule="straggler", level="warn", sentence="rank 3", facts={"rank": 3})
    shown = share(
        node_rank, last_beat=record, beat_age_s=3.0, verdict=conclude([found]), flags=["stale"],
        figures=RunFigures(record=record, usual_tokens_per_s=900.0, pace_s=1.0, phase=use),
        pods=[PodShare(pod="a", node_rank=0, state="failed", why="it lies")],
    )  # fmt: skip
    return shown.model_dump(mode="json")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the fields of a document are; of a list its first item stands for all."""
    pairs: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        pairs = iter(value.items())
    elif isinstance(value, list):
        pairs = iter(list(enumerate(value))[:1])
    if at:
        yield at
    for key, item in pairs:
        yield from places(item, (*at, key))


def replaced(document: Any, at: tuple[Any, ...], lie: Any) -> Any:
    changed = json.loads(json.dumps(document))
    place = changed
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = lie
    return changed


@dataclass(frozen=True)
class Pods:
    """Two pods with one run."""

    operator: Operator
    transports: dict[str, FakeTransport]

    def say(self, pod: str, document: Any) -> None:
        whole = {"pod_unix_s": 1.0, "boot_id": "b", "runs": [document]}
        self.transports[pod].answers["nsa_ops.pod.probe"] = completed(json.dumps(whole))

    def look(self) -> RunReport:
        return find_run(self.operator, "r1").report


@pytest.fixture
def pods(desk: Desk) -> Pods:
    """Two pods with one run; the first is honest."""
    desk.store.add_pod(OTHER)
    desk.store.save_run(SEVERAL)
    both = {POD.name: FakeTransport(), "b": FakeTransport()}
    both[POD.name].answers["nsa_ops.pod.probe"] = answer(share(0))
    return Pods(replace(desk.operator, connect=lambda pod, _settings: both[pod.name]), both)


def screens(seen: RunReport) -> str:
    """What `status`, `health` and `watch` show."""
    console = Console(file=io.StringIO(), width=300)
    draw_status(console, RunStatusLine(SEVERAL, seen))
    draw_health(console, RunStatusLine(SEVERAL, seen))
    draw_frame(console, Frame(seen, [], [], []))
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows_of(seen: RunReport) -> list[ScreenLine]:
    return [*frame_rows(Frame(seen, [], [], [])), *verdict_rows(seen.verdict)]


def refuse_constant(name: str) -> None:
    raise AssertionError(name)


#: What came with several ranks and pods, and what is shown beside it.
IN_QUESTION = (
    "ranks",
    "pods",
    "manifest",
    "figures",
    "verdict",
    "flags",
    "why",
    "state",
    "run_dir",
)


@pytest.mark.parametrize(
    ("lie", "node_rank"),
    [(lie, 1) for lie in LIES] + [(lie, 0) for lie in ("negative", "30-digits", "escape", "null")],
)
def test_no_field_of_an_answer_breaks_a_screen_or_speaks_for_another_pod(
    pods: Pods, lie: str, node_rank: int
) -> None:
    document, honest = outspoken(node_rank), share(1 - node_rank)
    link = pods.operator.link((POD, OTHER)[node_rank])
    for at in [place for place in places(document) if place[0] in IN_QUESTION]:
        pods.say(link.record.name, replaced(document, at, LIES[lie]))
        try:
            lying = probe_run(RunHandle(link, "code-1", "r1"))
        except VerificationError:
            continue
        both = (lying, honest) if node_rank == 0 else (honest, lying)
        seen = merge(both[0], "a", [MemberReport("b", 1, both[1])])
        lines = [styled(row).plain for row in rows_of(seen)]
        assert not any("\x1b" in line or len(line) > 4100 for line in lines), at
        assert len(lines) < 100, at
        json.loads(envelope("status", seen), parse_constant=refuse_constant)
        by_pod = [[one.rank for one in seen.ranks if one.pod == name] for name in "ab"]
        assert set(by_pod[0]) <= {0, 1}, at
        assert set(by_pod[1]) <= {2, 3}, at
        assert sum(map(len, by_pod)) == len(seen.ranks), at
        assert [one.pod for one in seen.pods] == ["a", "b"], at
        assert seen.pods[1 - node_rank].state in {"running", None}, at


def test_an_answer_that_cannot_be_used_names_the_pod_and_the_field(
    pods: Pods,
) -> None:
    pods.say("b", replaced(outspoken(), ("ranks", 0, "rank"), -1))
    (flag,) = pods.look().flags
    assert flag.startswith("pod `b` says nothing: The agent on pod `b` gave no answer")
    assert "ranks.0.rank" in flag
    pods.say(POD.name, replaced(outspoken(), ("ranks", 0, "rank"), -1))
    with pytest.raises(VerificationError, match=r"ranks\.0\.rank"):
        pods.look()


@pytest.mark.parametrize("count", [300, 20_000])
def test_more_ranks_than_a_pod_can_have_are_no_answer(pods: Pods, count: int) -> None:
    many = [{"rank": number, "step": number} for number in range(count)]
    pods.say("b", outspoken() | {"ranks": many})
    seen = pods.look()
    assert [rank.rank for rank in seen.ranks] == [0, 1]
    assert "says nothing" in seen.flags[0]


def test_ranks_of_another_pod_and_ranks_said_twice_are_left_out_with_a_flag() -> None:
    slow = {"beat_age_s": 900.0, "still_s": 900.0, "own_s": 50.0}
    lying = share(1, ranks=(*ranks(0, **slow), *ranks(2), *ranks(3, 1, **slow), *ranks(9, 1)))
    seen = merge(share(0), "a", [MemberReport("b", 1, lying)])
    assert [(rank.rank, rank.pod) for rank in seen.ranks] == [
        (0, "a"), (1, "a"), (2, "b"), (3, "b"),
    ]  # fmt: skip
    assert [rank.own_s for rank in seen.ranks] == [0.8, 0.8, 0.8, 50.0]
    assert seen.flags == [
        "pod `b`: it has ranks 2 to 3, and 4 ranks that it shows beside them count for none"
    ]


def test_a_pod_that_takes_the_place_of_another_has_none_of_its_ranks() -> None:
    lying = share(0, ranks=ranks(0, beat_age_s=900.0))
    seen = merge(share(0), "a", [MemberReport("b", 1, lying)])
    assert [(rank.rank, rank.pod, rank.beat_age_s) for rank in seen.ranks] == [
        (0, "a", 3.0), (1, "a", 3.0),
    ]  # fmt: skip


def test_a_pod_of_a_run_of_one_says_nothing_of_other_pods(desk: Desk) -> None:
    desk.store.save_run(RUN)
    lying = report(
        ranks=(*ranks(0, pod="b"), *ranks(0, pod="c")),
        pods=[PodShare(pod="b", node_rank=1, state="failed", why="its rank 3 is stuck")],
    )
    desk.transport.answers["nsa_ops.pod.probe"] = answer(lying)
    seen = find_run(desk.operator, "r1").report
    assert ([(rank.rank, rank.pod) for rank in seen.ranks], seen.pods) == ([(0, ""), (1, "")], [])
    assert "b" not in {one.pod for one in seen.pods}


def test_a_rank_that_claims_a_step_beyond_the_last_makes_no_other_rank_late() -> None:
    still = {"still_s": 900.0, "beat_age_s": 3.0}
    last = share(0).manifest.steps
    lying = share(1, ranks=ranks(2, step=last + 1, own_s=0.001, **still))
    seen = merge(share(0, ranks=ranks(0, **still)), "a", [MemberReport("b", 1, lying)])
    assert [rank.problem != "" for rank in seen.ranks] == [False, False, True, True]
    text = screens(seen)
    assert "waiting" not in text
    assert "slowest is rank 1 on pod `a` (1.00 times" in text
    honest = share(1, ranks=ranks(2, step=last, **still))
    seen = merge(share(0, ranks=ranks(0, **still)), "a", [MemberReport("b", 1, honest)])
    named = "for ranks 0 and 1 on pod `a` in train at step 100"
    assert f"ranks 2 and 3 on pod `b` in train at step {last} {named}" in screens(seen)


def test_another_attempt_of_the_same_number_says_nothing_about_this_one() -> None:
    other = share(1).manifest.model_copy(update={"attempt_id": "b" * 32})
    seen = merge(share(0), "a", [MemberReport("b", 1, share(1, "failed", manifest=other))])
    assert (seen.state, seen.pods[1].state) == ("running", None)
    assert "its attempt 1 is another one than that of pod 0" in seen.flags[0]


def test_an_agent_that_does_not_name_its_attempt_is_counted() -> None:
    older = share(1).manifest.model_copy(update={"attempt_id": ""})
    seen = merge(share(0), "a", [MemberReport("b", 1, share(1, "failed", manifest=older))])
    assert (seen.state, seen.pods[1].state) == ("halting", "failed")


def test_a_time_that_no_clock_measures_makes_no_other_rank_slow() -> None:
    assert slowest_factor([5e-324, 0.8]) == slowest_factor([0.0, 0.8]) == 1.0
    spread = rank_spread((*ranks(0), *ranks(2, own_s=5e-324)))
    assert spread is not None
    assert spread.factor < 1.01


def test_many_findings_of_one_pod_are_no_answer(
    pods: Pods,
) -> None:
    found = [{"rule": f"r{n}", "level": "halt", "sentence": "x"} for n in range(5000)]
    lie = {"level": "halt", "findings": found}
    pods.say("b", outspoken() | {"verdict": lie})
    seen = pods.look()
    assert seen.verdict.level == "healthy"
    assert len(screens(seen).splitlines()) < 100


def test_an_error_of_a_pod_that_is_a_megabyte_long_is_cut(
    pods: Pods,
) -> None:
    pods.transports["b"].answers["nsa_ops.pod.probe"] = completed(
        "", exit_code=1, stderr="y" * 2**20
    )
    assert len(screens(pods.look())) < 60_000
