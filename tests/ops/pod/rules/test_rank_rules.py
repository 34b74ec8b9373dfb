"""Which of several ranks the rules name: made-up heartbeats of 2, 4 and 8 ranks."""

from dataclasses import replace

import pytest

from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.rank_evidence import find_odd, rank_spread
from nsa_ops.pod.rules.rank_rules import straggler
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, RunFacts, Tracker
from tests.ops.pod.health import ALIVE, LIMITS, beat, found

FACTS = RunFacts(total_steps=50_000, warmup_steps=10, collective_timeout_s=120.0)
STEPS = 20
#: When the last step of `train` was logged.
END_S = 10.0 * STEPS


class Ranks:
    """Heartbeats of some ranks that have trained together for 20 steps of 1 s each."""

    def __init__(self, count: int, *, first: int = 0, skip: tuple[int, ...] = ()) -> None:
        self.numbers = range(first, first + count)
        self.beats = {
            rank: [self._record(rank, step) for step in range(1, STEPS + 1)]
            for rank in self.numbers
            if rank not in skip
        }

    def _record(self, rank: int, step: int, **fields):
        loss = {"loss": 3.0} if rank == 0 else {"loss": None, "lr": None, "grad_norm": None}
        given = {"rank": rank, "work_s": 0.8, "sync_s": 0.2, "data_s": 0.0}
        return beat(step, **{**loss, **given, **fields})

    def again(self, rank: int, **fields) -> "Ranks":
        """What all records of a rank say."""
        self.beats[rank] = [one.model_copy(update=fields) for one in self.beats[rank]]
        return self

    def wait(self, seconds: float, *, silent: tuple[int, ...] = (), **places) -> "Ranks":
        """Every rank but the silent ones writes beats and does not move; `r1={...}` is where."""
        for rank, lines in self.beats.items():
            if rank in silent:
                continue
            place = {"msg": "beat", **places.get(f"r{rank}", {})}
            for at_s in (1.0, seconds):
                alive = lines[-1].alive_seq + 1
                fields = {"ts": END_S + at_s, "alive_seq": alive, **place}
                lines.append(lines[-1].model_copy(update=fields))
        return self

    def evidence(
        self, after_s: float, process: ProcessEvidence = ALIVE, facts=FACTS, **problems: str
    ):
        tracker = Tracker(facts, 1, ranks=self.numbers)
        for rank in self.numbers:
            lines = self.beats.get(rank, [])
            if rank == self.numbers[0]:
                tracker.feed(lines)
            else:
                tracker.feed_rank(rank, lines, problems.get(f"r{rank}", ""))
        return tracker.evidence(END_S + after_s, process, MachineEvidence())

    def judged(
        self, after_s: float, process: ProcessEvidence = ALIVE, limits=LIMITS, **problems: str
    ) -> Verdict:
        return judge(self.evidence(after_s, process, **problems), limits)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_that_train_together_are_healthy(count: int) -> None:
    assert Ranks(count).judged(5.0).level == "healthy"
    assert len(Ranks(count).evidence(5.0).ranks) == count
    alone = Tracker(FACTS, 1)
    alone.feed(Ranks(1).beats[0])
    assert alone.evidence(END_S, ALIVE, MachineEvidence()).ranks == ()


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(
    ("age_s", "level"), [(55, None), (61, "warn"), (175, "warn"), (185, "halt")]
)
def test_a_stopped_rank_is_named_while_the_others_beat(
    count: int, age_s: float, level: str | None
) -> None:
    verdict = Ranks(count).wait(age_s, silent=(1,)).judged(age_s)
    assert found(verdict).get("heartbeat_stale") == level
    if level:
        assert (verdict.rule, verdict.facts["ranks"]) == ("heartbeat_stale", [1])
        assert f"No heartbeat of rank 1 for {age_s} s" in verdict.sentence
        rest = "1 other rank of this pod writes its own"
        if count > 2:
            rest = f"{count - 1} other ranks of this pod write theirs"
        assert rest in verdict.sentence


def test_a_stopped_first_rank_is_named_too_and_several_together() -> None:
    assert "of rank 0 for" in Ranks(2).wait(185, silent=(0,)).judged(185).sentence
    verdict = Ranks(4).wait(185, silent=(1, 3)).judged(185)
    assert "No heartbeat of ranks 1 and 3 for" in verdict.sentence
    everyone = Ranks(2).judged(185)
    assert "No heartbeat of ranks 0 and 1 for 185 s" in everyone.sentence
    assert "other rank" not in everyone.sentence


def test_a_rank_that_never_booted_is_named_within_the_limit_of_the_first_beat() -> None:
    def after(age_s: float) -> Verdict:
        process = ProcessEvidence(trainer_alive=True, age_s=age_s)
        return Ranks(4, skip=(2,)).judged(5.0, process)

    assert after(100).level == "healthy"
    warned, halted = after(200), after(901)
    assert (warned.rule, warned.level) == ("heartbeat_stale", "warn")
    assert "200 s ago, and rank 2 has not written a heartbeat" in warned.sentence
    assert warned.sentence.endswith("and 3 other ranks of this pod have")
    assert (halted.rule, halted.level) == ("heartbeat_stale", "halt")
    none = Ranks(2, skip=(0, 1)).judged(0.0, ProcessEvidence(trainer_alive=True, age_s=901))
    assert "ranks 0 and 1 have not written a heartbeat" in none.sentence


def test_a_rank_whose_file_cannot_be_used_is_not_called_missing() -> None:
    process = ProcessEvidence(trainer_alive=True, age_s=2000)
    verdict = Ranks(4, skip=(2,)).judged(5.0, process, r2="it is no regular file")
    assert verdict.level == "healthy"


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(("still_s", "level"), [(25, None), (40, "warn"), (620, "halt")])
def test_a_rank_that_hangs_in_its_data_is_named_and_not_those_that_wait_for_it(
    count: int, still_s: float, level: str | None
) -> None:
    ranks = Ranks(count).wait(still_s, r1={"phase": "data_wait"})
    verdict = ranks.judged(still_s)
    assert found(verdict).get("stall") == level
    if level:
        assert verdict.facts["ranks"] == [1]
        assert verdict.sentence.startswith("Rank 1 has not moved for")
        assert "in phase data_wait at step 20 (limit 600 s)" in verdict.sentence
        waits = "rank 0 waits for it" if count == 2 else " wait for it"
        assert waits in verdict.sentence


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_rank_that_is_behind_is_named(count: int) -> None:
    ahead = {f"r{rank}": {"step": 21} for rank in range(count) if rank != 1}
    verdict = Ranks(count).wait(190, **ahead).judged(190)
    assert (verdict.rule, verdict.level, verdict.facts["ranks"]) == ("stall", "halt", [1])
    assert "in phase train at step 20 (limit 180 s) and is 1 step behind" in verdict.sentence
    micro = {f"r{rank}": {"micro_step": 3} for rank in range(count) if rank != 1}
    verdict = Ranks(count).wait(190, **micro, r1={"micro_step": 2}).judged(190)
    assert verdict.facts["ranks"] == [1]
    assert "and is at micro-batch 2 of it" in verdict.sentence


def test_several_ranks_that_are_behind_are_named_together() -> None:
    verdict = Ranks(4).wait(190, r0={"step": 22}, r2={"step": 22}).judged(190)
    assert verdict.facts["ranks"] == [1, 3]
    assert verdict.sentence.startswith("Ranks 1 and 3 have not moved for 190 s")
    assert "and are 2 steps behind" in verdict.sentence


def test_a_step_that_takes_too_long_warns_before_the_others_give_up() -> None:
    ahead = {"r0": {"step": 21}}
    assert found(Ranks(2).wait(55, **ahead).judged(55)) == {}
    assert found(Ranks(2).wait(65, **ahead).judged(65)) == {"stall": "warn"}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_where_all_wait_at_the_same_place_all_are_named(count: int) -> None:
    assert Ranks(count).wait(50).judged(50).level == "healthy"
    verdict = Ranks(count).wait(190).judged(190)
    assert (verdict.rule, verdict.level) == ("stall", "halt")
    assert verdict.sentence.startswith(f"All {count} ranks of this pod have not moved for")
    assert "in phase train at step 20" in verdict.sentence
    assert "a collective that never completes" in verdict.sentence


def test_ranks_that_wait_for_a_checkpoint_or_a_validation_have_its_patience() -> None:
    for phase in ("checkpoint", "eval"):
        waiting = Ranks(4).wait(250, r0={"phase": phase})
        assert waiting.judged(250).level == "healthy"
        verdict = Ranks(4).wait(310, r0={"phase": phase}).judged(310)
        assert verdict.level == "halt"
        assert verdict.sentence.startswith(f"Rank 0 has not moved for 309 s in phase {phase}")


def test_a_rank_that_stages_data_does_not_halt_those_that_wait_in_another_phase() -> None:
    places = {f"r{rank}": {"phase": "init"} for rank in (1, 2, 3)}
    staging = Ranks(4).wait(5000, **places, r0={"phase": "data"})
    assert found(staging.judged(5000)) == {"stall": "warn"}
    both = Ranks(2).wait(5000, r1={"phase": "init"}, r0={"phase": "data"})
    assert found(both.judged(5000)) == {"stall": "warn"}


def test_a_rank_that_ended_alone_is_told_from_one_that_is_silent() -> None:
    place = {"msg": "end", "phase": "shutdown"}
    assert found(Ranks(4).wait(100, r2=place).judged(100)) == {"stall": "warn"}
    stalled = Ranks(4).wait(200, r2=place).judged(200)
    assert (stalled.rule, stalled.level) == ("stall", "halt")
    assert stalled.sentence.startswith(
        "Rank 2 ended at step 20, and ranks 0, 1 and 3 have not moved for 200 s in phase train"
    )
    assert "did not get equally many batches" in stalled.sentence


def test_a_stopped_rank_is_named_though_the_ranks_that_waited_for_it_gave_up_and_ended() -> None:
    gone = Ranks(2).wait(150, silent=(1,), r0={"msg": "end", "phase": "shutdown"})
    verdict = gone.judged(151)
    assert found(verdict) == {"heartbeat_stale": "warn", "stall": "warn"}
    assert "phase train, rank 0 has ended: its process is stopped" in verdict.sentence
    stalled = verdict.findings[1]
    assert stalled.facts["ranks"] == [1]
    assert stalled.sentence.startswith("Rank 1 has not moved for 151 s in phase train at step 20")
    assert "and written no heartbeat for 151 s; rank 0 has ended; `nsa-ops" in stalled.sentence


def test_a_rank_that_has_ended_or_waits_halts_nothing_while_another_one_works() -> None:
    """Rank 0 draws samples and saves at the end of a run, for as long as it takes."""
    for place in ({"msg": "end", "phase": "shutdown"}, {"phase": "shutdown"}, {"phase": "eval"}):
        ranks = Ranks(2).wait(2000, r1=place, r0={"phase": "checkpoint"})
        last = ranks.beats[0][-1]
        working = last.model_copy(update={"progress_seq": 99, "alive_seq": 99})
        ranks.beats[0].append(working.model_copy(update={"ts": END_S + 1995}))
        assert ranks.judged(2000).level == "healthy", place


def test_ranks_of_a_second_pod_have_their_own_numbers() -> None:
    verdict = Ranks(4, first=4).wait(190, silent=(6,)).judged(190)
    assert "No heartbeat of rank 6 for" in verdict.sentence
    alone = Ranks(1, first=5).wait(190).judged(190)
    assert alone.sentence.startswith("Rank 5, the only one of this pod, has not moved for")


def test_ranks_that_wait_for_another_pod_have_the_patience_of_what_may_go_on_there() -> None:
    """A rank of the other pod may wait for its data for 600 s; its watchdog halts it then."""
    facts = replace(FACTS, num_pods=2)

    def judged(still_s: float, **places) -> Verdict:
        ranks = Ranks(2).wait(still_s, **places)
        return judge(ranks.evidence(still_s, facts=facts), LIMITS)

    assert found(judged(190)) == found(judged(700)) == {"stall": "warn"}
    assert "it may be one of another pod that they wait for" in judged(190).sentence
    assert judged(790).level == "halt"
    behind = judged(190, r0={"step": 21})
    assert (behind.level, behind.facts["ranks"]) == ("halt", [1])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_straggler_is_named_with_its_factor_and_its_card(count: int) -> None:
    ranks = Ranks(count).again(0, temp_c=60.0)
    ranks.again(1, work_s=1.2, sync_s=0.0, temp_c=91.0, throttle="sw_thermal_slowdown")
    verdict = ranks.judged(5.0)
    assert (verdict.rule, verdict.level) == ("straggler", "warn")
    assert verdict.sentence == (
        "Rank 1 takes 1.50 times as long for a step as the median of the other ranks (1.2 s, not "
        "0.8 s), in each of the last 5 records up to step 20: all wait for it; its card is at 91 "
        "degrees C (the others 60), its clocks are throttled (sw_thermal_slowdown)"
    )
    assert (verdict.facts["rank"], verdict.facts["factor"]) == (1, 1.5)


def test_a_straggler_that_waits_for_its_data_is_told_so_and_one_of_unknown_cause_only_named() -> (
    None
):
    slow = Ranks(4).again(1, data_s=0.35, temp_c=50.0)
    assert "it waits 0.35 s of them for its batch" in slow.judged(5.0).sentence
    plain = Ranks(4).again(1, work_s=1.2)
    assert plain.judged(5.0).sentence.endswith("all wait for it")


def test_no_straggler_where_the_work_is_alike_where_few_records_agree_or_nobody_says() -> None:
    assert Ranks(4).again(1, work_s=0.9).judged(5.0).level == "healthy"  # 1.125 times
    once = Ranks(4)
    once.beats[1][-3:] = [one.model_copy(update={"work_s": 9.0}) for one in once.beats[1][-3:]]
    assert once.judged(5.0).level == "healthy"
    in_turn = Ranks(4)
    for index in range(STEPS):
        lines = in_turn.beats[index % 2]
        lines[index] = lines[index].model_copy(update={"work_s": 9.0})
    assert in_turn.judged(5.0).level == "healthy"
    silent = Ranks(4).again(1, work_s=9.0)
    for rank in (0, 2, 3):
        silent.again(rank, work_s=None)
    assert silent.judged(5.0).level == "healthy"


def test_the_limits_of_a_straggler_can_be_set() -> None:
    ranks = Ranks(4).again(1, work_s=1.2)
    patient = WatchdogLimits(straggler_factor=1.6)
    assert ranks.judged(5.0, limits=patient).level == "healthy"
    ranks = Ranks(4)
    ranks.beats[1][-3:] = [one.model_copy(update={"work_s": 9.0}) for one in ranks.beats[1][-3:]]
    assert found(ranks.judged(5.0, limits=WatchdogLimits(straggler_records=3))) == {
        "straggler": "warn"
    }


def test_ranks_of_two_pods_are_judged_together() -> None:
    """A tuple of several pods is one: the odd rank and the straggler are found across them."""
    here = Ranks(2).wait(100).evidence(100).ranks
    there = Ranks(2, first=2).again(3, work_s=1.6).wait(100, r3={"phase": "data_wait"})
    evidence = there.evidence(100)
    ranks = here + evidence.ranks
    odd = find_odd(ranks, 60.0)
    assert [rank.rank for rank in odd.ranks] == [3]
    assert odd.by == "phase"
    assert "Rank 3 takes 2.00 times" in straggler(replace(evidence, ranks=ranks), LIMITS).sentence
    spread = rank_spread(ranks)
    assert (spread.fastest_s, spread.median_s, spread.slowest_s) == (0.8, 0.8, 1.6)
    assert (spread.slowest.rank, spread.factor) == (3, 2.0)


def test_the_memory_of_every_rank_is_judged_and_the_rank_is_named() -> None:
    def growing(**slopes: int) -> Verdict:
        ranks = Ranks(4)
        for rank in ranks.numbers:
            slope = slopes.get(f"r{rank}", 0)
            ranks.beats[rank] = [
                ranks._record(rank, step, gpu_mem_alloc=20_000 + slope * step)
                for step in range(1, 60)
            ]
        return ranks.judged(450.0)

    assert "memory_creep" not in found(growing())
    one = next(f for f in growing(r3=100).findings if f.rule == "memory_creep")
    assert one.sentence == (
        "The GPU memory of rank 3 has grown from 21050 to 24950 MiB and still grows"
    )
    two = next(f for f in growing(r1=60, r3=100).findings if f.rule == "memory_creep")
    assert two.sentence.endswith("and still grows; likewise on rank 1")
    assert two.facts["ranks"] == [1, 3]


def test_a_card_near_its_limit_is_warned_of_on_any_rank() -> None:
    full = {"gpu_mem_peak": 80_500, "gpu_mem_total": 81_559}
    some = {"gpu_mem_peak": 60_000, "gpu_mem_total": 81_559}
    ranks = Ranks(4)
    for rank in ranks.numbers:
        ranks.again(rank, **(full if rank == 3 else some))
    verdict = ranks.judged(5.0)
    assert found(verdict) == {"card_memory_high": "warn"}
    assert verdict.sentence == (
        "The card of rank 3 had 80,500 of 81,559 MiB in tensors at its peak (98.7 %, limit 98 %): "
        "a step that needs more runs out of memory"
    )
    assert found(ranks.judged(5.0, limits=WatchdogLimits(card_memory_fraction=0.99))) == {}
    ranks.again(1, **full)
    assert ranks.judged(5.0).sentence.endswith("; likewise on rank 3")
    alone = Tracker(FACTS, 1)
    alone.feed(Ranks(1).again(0, **full).beats[0])
    verdict = judge(alone.evidence(END_S, ALIVE, MachineEvidence()), LIMITS)
    assert verdict.sentence.startswith("The card had 80,500 of 81,559 MiB")


def test_late_batches_of_any_rank_are_reported_with_the_rank() -> None:
    verdict = Ranks(4).again(2, dt_fetch_s=3.0).judged(5.0)
    assert found(verdict) == {"data_slow": "warn"}
    assert verdict.sentence == (
        "Batches of rank 2 arrive slowly at step 20: batches take 3.0 s (limit 2 s)"
    )
    both = Ranks(4).again(2, fetch_p95_ms=150.0).again(0, fetch_p95_ms=200.0).judged(5.0)
    assert (both.facts["ranks"], "likewise on rank 2" in both.sentence) == ([0, 2], True)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"data_s": 0.8}, "waiting for data of rank 2 is 80 % of a step: look at the loader"),
        (
            {"data_s": 0.0, "throttle": "0x0000000000000020"},
            "the clocks of rank 2 are throttled (sw_thermal_slowdown): look at power",
        ),
        ({"data_s": 0.0}, "the data loader is not the cause"),
    ],
)
def test_what_slows_a_run_down_is_looked_for_on_every_rank(
    fields: dict[str, object], cause: str
) -> None:
    ranks = Ranks(4)
    expecting = WatchdogLimits(expected_tokens_per_s=1000.0, straggler_factor=9.0)
    ranks.again(0, tokens_per_s=500.0).again(2, **fields)
    (low,) = ranks.judged(5.0, limits=expecting).findings
    assert low.rule == "throughput_low"
    assert cause in low.sentence


def test_a_rank_whose_file_cannot_be_used_is_judged_by_no_rule_of_its_machine() -> None:
    ranks = Ranks(2, skip=(1,))
    assert found(ranks.judged(5.0, r1="it is no regular file")) == {}


def test_figures_that_are_no_measurements_are_not_shown() -> None:
    ranks = Ranks(2).again(
        1, work_s=-1.0, step_s=float("nan"), gpu_mem_peak=10**30, temp_c=float("inf"),
        throttle="x" * 1000,
    )  # fmt: skip
    one = ranks.evidence(5.0).ranks[1]
    assert (one.work_s, one.step_s, one.gpu_mem_peak, one.temp_c) == (None, None, None, None)
    assert len(one.throttle) == 80
    assert ranks.judged(5.0).level == "healthy"
