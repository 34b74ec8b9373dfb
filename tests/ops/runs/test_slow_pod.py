"""A slow pod of several: its own watchdog cannot see it, the laptop does, and says who it is."""

import io
from typing import Any

import pytest
from rich.console import Console

from nsa_ops.cli.render_run import draw_frame, draw_health, draw_status
from nsa_ops.pod.messages import RunReport
from nsa_ops.pod.rank_evidence import OwnTime, RankEvidence
from nsa_ops.pod.rules.verdict import Finding, conclude
from nsa_ops.runs.members import MemberReport, merge
from nsa_ops.runs.slow_pod import find_slow_pod
from nsa_ops.runs.status import RunStatusLine
from nsa_ops.runs.watch import Frame
from tests.ops.runs.documents import RUN, report

STEPS = range(110, 310, 10)


def ranks(pod: str, first: int, *own_s: float, **fields: Any) -> tuple[RankEvidence, ...]:
    """Ranks of one pod, each with its own time in every step; ranks differ a little by turns."""
    found = []
    for number, seconds in enumerate(own_s, start=first):
        noise = [0.001 * ((step // 10 + number) % 2) for step in STEPS]
        recent = [
            OwnTime(step=step, own_s=seconds + more)
            for step, more in zip(STEPS, noise, strict=True)
        ]
        given = {"own_s": seconds, "recent": recent, "msg": "progress", "phase": "train"}
        found.append(RankEvidence(rank=number, pod=pod, step=300, **(given | fields)))
    return tuple(found)


def judged(*shown: tuple[RankEvidence, ...], factor: float = 1.2, records: int = 5):
    return find_slow_pod([rank for of_pod in shown for rank in of_pod], factor, records)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_pod_all_of_whose_ranks_are_slow_is_named_with_its_slowest_rank(count: int) -> None:
    here = ranks("a", 0, *[0.8] * count)
    slow = ranks("b", count, *[1.2] * (count - 1), 1.21)
    found = judged(here, slow)
    assert found is not None
    assert (found.rule, found.level) == ("straggler", "warn")
    number = 2 * count - 1
    assert found.sentence.startswith(
        f"Rank {number} on pod `b` takes 1.51 times as long for a step"
    )
    assert "(1.21 s, not 800 ms), in each of the last 5 records up to step 300" in found.sentence
    whole = f"; all {count} ranks of that pod are slow: look at its machine"
    assert (whole in found.sentence) == (count > 1)
    assert (found.facts["rank"], found.facts["pod"]) == (number, "b")


def test_one_slow_rank_is_named_without_its_pod_being_called_slow() -> None:
    slow = ranks("b", 2, 0.8, 1.3, temp_c=88.0)
    found = judged(ranks("a", 0, 0.8, 0.8, temp_c=60.0), slow)
    assert found is not None
    assert found.sentence.startswith("Rank 3 on pod `b` takes 1.6")
    assert found.sentence.endswith("all wait for it; its card is at 88 degrees C (the others 60)")


def test_of_three_pods_the_two_others_are_what_is_usual() -> None:
    found = judged(ranks("a", 0, 0.8, 0.8), ranks("b", 2, 0.9, 0.9), ranks("c", 4, 1.2, 1.2))
    assert found is not None
    assert found.facts["pod"] == "c"


def test_no_pod_is_slow_below_the_factor_in_turns_in_few_records_or_alone() -> None:
    here = ranks("a", 0, 0.8, 0.8)
    assert judged(here, ranks("b", 2, 0.9, 0.9)) is None  # 1.125 times
    assert judged(here, ranks("b", 2, 1.2, 1.2), factor=1.6) is None
    assert judged(here) is None
    one = ranks("b", 2, 1.2)[0]
    few = one.model_copy(update={"recent": one.recent[-4:]})
    assert judged(here, (few,)) is None
    assert judged(here, (few,), records=4) is not None
    in_turn = [(step, 2.0 if step % 20 else 0.1) for step in STEPS]
    turning = one.model_copy(
        update={"recent": tuple(OwnTime(step=step, own_s=s) for step, s in in_turn)}
    )
    assert judged(here, (turning,)) is None
    assert judged(here, (one.model_copy(update={"problem": "no whole line"}),)) is None
    assert judged(here, ranks("b", 2, 1.2)[:0]) is None


def test_times_that_no_clock_measures_make_no_other_pod_slow() -> None:
    tiny = RankEvidence(
        rank=2, recent=tuple(OwnTime(step=step, own_s=5e-324) for step in STEPS), pod="b"
    )
    assert judged(ranks("a", 0, 0.8, 0.8), (tiny,)) is None


def share(node_rank: int, *own_s: float, **fields: Any) -> RunReport:
    summary = report().manifest.model_copy(
        update={"node_rank": node_rank, "num_pods": 2, "ranks_per_pod": len(own_s)}
    )
    shown = ranks("", node_rank * len(own_s), *own_s)
    return report(ranks=shown, manifest=summary, **fields)


def screens(seen: RunReport) -> list[str]:
    found = []
    for draw in (
        lambda console: draw_status(console, RunStatusLine(RUN, seen)),
        lambda console: draw_health(console, RunStatusLine(RUN, seen)),
        lambda console: draw_frame(console, Frame(seen, [], [], [])),
    ):
        console = Console(file=io.StringIO(), width=300)
        draw(console)
        found.append(console.file.getvalue())  # type: ignore[attr-defined]
    return found


def test_all_screens_of_a_run_warn_of_a_slow_pod_that_no_watchdog_sees() -> None:
    seen = merge(share(0, 0.8, 0.8), "a", [MemberReport("b", 1, share(1, 1.2, 1.21))])
    assert seen.verdict.level == "warn"
    for screen in screens(seen):
        assert screen.startswith("verdict      warn straggler: Rank 3 on pod `b` takes 1.51 times")
        assert "slowest is rank 3 on pod `b` (1.51 times the others)" in screen
    alike = merge(share(0, 0.8, 0.8), "a", [MemberReport("b", 1, share(1, 0.8, 0.8))])
    assert alike.verdict.level == "healthy"


def test_a_straggler_that_its_own_watchdog_has_found_is_told_once() -> None:
    own = conclude([Finding(rule="straggler", level="warn", sentence="Rank 3", subject="3")])
    seen = merge(share(0, 0.8, 0.8), "a", [MemberReport("b", 1, share(1, 0.8, 1.3, verdict=own))])
    (found,) = seen.verdict.findings
    assert found.sentence.startswith("Rank 3 on pod `b` takes 1.6")


def test_a_slow_pod_comes_before_what_slows_nobody_down() -> None:
    full = conclude([Finding(rule="card_memory_high", level="warn", sentence="it is full")])
    seen = merge(share(0, 0.8, 0.8, verdict=full), "a", [MemberReport("b", 1, share(1, 1.2, 1.2))])
    assert [one.rule for one in seen.verdict.findings] == ["straggler", "card_memory_high"]


def test_the_limits_are_those_of_the_run() -> None:
    patient = share(0, 0.8, 0.8)
    limits = {"straggler_factor": 2.0}
    summary = patient.manifest.model_copy(update=limits)
    first = patient.model_copy(update={"manifest": summary})
    seen = merge(first, "a", [MemberReport("b", 1, share(1, 1.2, 1.2))])
    assert seen.verdict.level == "healthy"
