"""Which of several ranks failed first, with which words, and what that makes of the attempt."""

import pytest

from nsa_core.rundir.ranks import RankEnd
from nsa_ops.pod.rank_ending import (
    JudgedEnd,
    RankTrace,
    ReportedFailure,
    judge_ranks,
    parse_failures,
    parse_words,
)

BY_HAND = "out of host memory, or by hand"


def ended(rank: int, at: float, *, code: int = 1, follows: bool = False, reason: str = "why"):
    end = RankEnd(
        run_id="r", attempt=1, rank=rank, code=code, reason=reason, step=12, at=at, follows=follows
    )
    return RankTrace(rank, pid=100 + rank, end=end, step=12, phase="train")


def lost(rank: int, last_seen: float | None, **fields) -> RankTrace:
    found = {"pid": 100 + rank, "step": 12, "phase": "train", **fields}
    return RankTrace(rank, last_seen=last_seen, **found)


def judged(*traces: RankTrace, total: int = 2, **given: str) -> JudgedEnd:
    found = judge_ranks(traces, total, **given)
    assert found is not None
    return found


def test_a_killed_rank_is_named_with_its_signal_and_the_one_that_lost_it_follows() -> None:
    found = judged(ended(0, 5.1, follows=True), lost(1, 5.0, code=-9), why_killed=BY_HAND)
    assert found == JudgedEnd(
        -9, f"rank 1 of 2 was killed by SIGKILL at step 12 ({BY_HAND}); the other rank followed"
    )


def test_the_rank_that_failed_first_gives_its_own_code_and_words() -> None:
    traces = [ended(rank, 9.0, follows=True) for rank in (0, 1)]
    found = judged(*traces, ended(2, 8.0, code=14, reason="shard 3 is torn"), total=3)
    assert found == JudgedEnd(
        14, "rank 2 of 3 failed at step 12: shard 3 is torn; the other 2 ranks followed"
    )


def test_of_two_that_failed_the_earlier_one_is_the_cause() -> None:
    assert judged(ended(0, 7.0, code=13), ended(1, 6.0, code=14)).code == 14
    assert judged(ended(0, 5.0, code=13), lost(1, 5.3, code=-6)).code == 13
    assert judged(ended(0, 5.5, code=1), lost(1, 5.3, code=-6)).code == -6


def test_what_torchrun_ended_with_term_is_not_the_cause_even_if_both_were_missed_at_once() -> None:
    assert judged(lost(0, 5.0, code=-15), lost(1, 5.0, code=-9)).reason.startswith("rank 1 ")
    first = judged(lost(0, 5.0, code=-9), lost(1, 5.0, code=-9, is_first=True))
    assert first.reason.startswith("rank 1 ")


def test_a_rank_that_left_nothing_is_described_by_its_last_heartbeat() -> None:
    found = judged(ended(0, 5.1, follows=True), lost(1, 5.0))
    assert found.code == 1
    assert found.reason.startswith(
        "rank 1 of 2 ended without a record at step 12 in phase train, pid 101"
    )
    assert "ended with code 3 and without a record" in judged(lost(0, 5.0, code=3)).reason


def test_a_rank_that_left_no_record_is_quoted_from_the_log() -> None:
    found = judged(ended(0, 5.1, follows=True), lost(1, 5.0, code=-6, words="std::bad_alloc"))
    assert "was killed by SIGABRT at step 12; its last words: std::bad_alloc;" in found.reason


def test_a_rank_whose_collective_timed_out_only_waited_for_the_one_that_is_stuck() -> None:
    waited = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    stuck = lost(1, 30.0, code=-9, is_stuck=True)
    found = judged(lost(0, 4.0, code=-6, words=waited), stuck)
    assert found == JudgedEnd(
        16,
        "rank 1 of 2 was stuck at step 12 in phase train, pid 101 and had to be killed "
        "(the others had gone)",
    )
    both = judged(*(lost(rank, 4.0, code=-6, words=waited) for rank in (0, 1)))
    assert both.code == 16
    assert both.reason.startswith("all ranks waited in vain for one another; rank 0 of 2: Watchdog")


def test_a_hang_that_the_watchdog_ended_names_the_rank_that_could_not_be_stopped() -> None:
    hung = "watchdog: stall: rank 1 has made no step for 200 s"
    stuck = lost(1, 30.0, code=-9, is_stuck=True)
    found = judged(ended(0, 24.0, code=16, reason="hung"), stuck, hung=hung)
    assert (found.code, found.reason[:7], hung in found.reason) == (16, "rank 1 ", True)
    assert judged(lost(0, 5.0, code=-9), lost(1, 5.1, code=-9), hung=hung).code == 16


def test_ranks_that_all_follow_lost_a_rank_of_another_pod() -> None:
    found = judged(ended(2, 5.0, follows=True), ended(3, 5.1, follows=True), total=4)
    assert found == JudgedEnd(1, "the ranks of this pod lost one of another pod; rank 2 of 4: why")


def test_ranks_that_could_not_stop_in_time_say_so_and_may_be_resumed() -> None:
    late = [
        ended(rank, 24.0, code=75, follows=True, reason="no clean stop within 24 s of SIGTERM")
        for rank in (0, 1)
    ]
    assert judged(*late) == JudgedEnd(75, "rank 0 of 2: no clean stop within 24 s of SIGTERM")


def test_an_end_that_all_agreed_on_stays_that_end_although_exit_json_could_not_be_written() -> None:
    found = judged(*(ended(rank, 5.0, code=75, reason="received SIGTERM") for rank in (0, 1)))
    assert (found.code, found.reason) == (75, "received SIGTERM")


def test_ranks_that_never_began_say_nothing() -> None:
    assert judge_ranks([RankTrace(0), RankTrace(1)], 2) is None


TORCHRUN = """\
[rank1]:[E1129 02:29:39.934 ProcessGroupNCCL.cpp:632] first
2026-11-29 02:29:39 rank 1: error: a bug: second
[rank10]: not of rank 1
Failures:
[1]:
  time      : 2026-11-29_02:29:39
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 27798)  (SIGTERM)
  exitcode  : -11 (pid: 1)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 27799)  (SIGKILL)
"""


def test_what_torchrun_reports_is_read_by_rank_with_the_first_failure() -> None:
    assert parse_failures(TORCHRUN) == {
        0: ReportedFailure(-15, 27798, is_first=False),
        1: ReportedFailure(-9, 27799, is_first=True),
    }
    assert parse_failures("  exitcode  : -9 (pid: 5)\n  rank : x\n") == {}


@pytest.mark.parametrize(
    "log",
    [
        f"  rank      : {'9' * 5000} (local_rank: 0)\n  exitcode  : 1 (pid: 5)\n",
        f"  rank      : 1 (local_rank: 1)\n  exitcode  : {'9' * 5000} (pid: 5)\n",
        "  rank      : 1 (local_rank: 1)\n  exitcode  : 4000 (pid: 5)\n",
        f"  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: {'9' * 5000})\n",
    ],
)
def test_a_number_that_cannot_be_one_of_torchrun_is_no_report(log: str) -> None:
    assert parse_failures(log) == {}


def test_the_words_of_a_rank_are_the_last_line_that_begins_with_its_name() -> None:
    assert parse_words(TORCHRUN, 1) == "error: a bug: second"
    assert parse_words(TORCHRUN, 10) == "not of rank 1"
    assert parse_words(TORCHRUN, 0) == ""
    assert len(parse_words("[rank0]: " + "x" * 5000, 0)) == 300
