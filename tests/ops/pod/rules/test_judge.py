import math

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.config.training import WatchdogLimits
from nsa_ops.pod.probe import figures_of
from nsa_ops.pod.rules.rulebook import RULES, judge
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, RunFacts, Tracker, facts_of
from tests.ops.pod.ends import exit_record
from tests.ops.pod.health import ALIVE, FACTS, LIMITS, beat, beats, found, judged

GIB = 2**30


def ended(code) -> ProcessEvidence:
    return ProcessEvidence(trainer_alive=False, exit=exit_record(code))


def test_steady_records_are_healthy_and_so_is_a_run_without_any() -> None:
    assert judged(beats(300, every=3)).level == "healthy"
    assert judged([]).level == "healthy"


def test_every_rule_has_its_own_name() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_a_trainer_that_is_gone_without_a_record_is_a_halt_at_once() -> None:
    verdict = judged(beats(5), process=ProcessEvidence(trainer_alive=False))
    assert found(verdict) == {"process_gone": "halt"}
    assert "step 5" in verdict.sentence


@pytest.mark.parametrize(
    ("code", "level"),
    [(0, "healthy"), (10, "healthy"), (75, "healthy"), (12, "halt"), (-9, "halt")],
)
def test_how_a_run_ended_decides_and_its_silence_afterwards_does_not(code: int, level: str) -> None:
    assert judged(beats(5), after_s=9e9, process=ended(code)).level == level


@pytest.mark.parametrize(("age_s", "level"), [(59, None), (61, "warn"), (181, "halt")])
def test_silence_is_measured_since_the_sequence_number_moved(age_s: int, level: str | None) -> None:
    assert found(judged(beats(5), after_s=age_s)).get("heartbeat_stale") == level


def test_the_same_beat_said_again_does_not_count_as_life() -> None:
    still = [beat(5, ts=50.0 + n, msg="beat") for n in range(300)]
    assert found(judged([*beats(5), *still]))["heartbeat_stale"] == "halt"


def test_a_process_that_never_wrote_a_beat_has_its_own_limit() -> None:
    def after(age_s: int):
        return found(judged([], process=ProcessEvidence(trainer_alive=True, age_s=age_s)))

    assert (after(100), after(200), after(901)) == (
        {}, {"heartbeat_stale": "warn"}, {"heartbeat_stale": "halt"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "still_s", "level"),
    [
        ("train", 170, None), ("train", 190, "halt"), ("compile", 1700, None),
        ("compile", 1810, "halt"), ("eval", 290, None), ("eval", 310, "halt"),
        ("checkpoint", 310, "halt"), ("data_wait", 20, None), ("data_wait", 40, "warn"),
        ("data_wait", 610, "halt"), ("data", 90_000, "warn"),
    ],
)  # fmt: skip
def test_each_phase_has_its_patience(phase: str, still_s: int, level: str | None) -> None:
    # The process lives and says so; the loop does not move.
    records = [*beats(5), beat(5, msg="beat", phase=phase, alive_seq=6)]
    alive = beat(5, msg="beat", phase=phase, alive_seq=7, ts=50.0 + still_s)
    assert found(judged([*records, alive])).get("stall") == level


def test_slow_steps_and_the_trainers_own_deadline_extend_the_patience() -> None:
    slow = beats(20, step_s=60.0)
    alive = beat(20, msg="beat", alive_seq=99, ts=slow[-1].ts + 500)
    assert found(judged([*slow, alive])) == {}
    staging = beat(0, msg="beat", phase="data", phase_deadline_s=5000.0)
    later = staging.model_copy(update={"alive_seq": 9, "ts": 4900.0})
    assert found(judged([staging, later])) == {}
    late = later.model_copy(update={"alive_seq": 10, "ts": 5100.0})
    assert found(judged([staging, later, late])) == {"stall": "halt"}


def test_a_long_checkpoint_gives_the_next_one_more_time() -> None:
    first = [beat(5, msg="beat", phase="checkpoint", alive_seq=6), beat(6, ts=50.0 + 200)]
    second = beat(6, msg="beat", phase="checkpoint", alive_seq=8, ts=260.0)
    alive = second.model_copy(update={"alive_seq": 9, "ts": 260.0 + 900})
    assert found(judged([*beats(5), *first, second, alive])) == {}


@pytest.mark.parametrize(
    "fault",
    [{"loss": math.nan}, {"loss": math.inf}, {"loss": 0.0}, {"grad_norm": math.nan},
     {"loss": None, "finite": False}, {"grad_norm": math.inf}],
)  # fmt: skip
def test_one_bad_record_warns_and_two_in_a_row_halt(fault) -> None:
    one = [*beats(20), beat(21, **fault)]
    assert found(judged(one))["loss_nonfinite"] == "warn"
    assert found(judged([*one, beat(22, **fault)]))["loss_nonfinite"] == "halt"


def test_three_bad_records_among_a_hundred_halt_although_good_ones_follow() -> None:
    records = beats(80)
    for index in (10, 40):
        records[index] = beat(index + 1, loss=math.nan)
    assert found(judged(records))["loss_nonfinite"] == "warn"
    records[60] = beat(61, loss=math.nan)
    assert found(judged(records))["loss_nonfinite"] == "halt"


def test_skipped_steps_that_do_not_follow_each_other_are_not_in_a_row() -> None:
    def skips(*steps):
        records = [beat(s, msg="anomaly", loss=None, finite=False) for s in steps]
        return found(judged([*beats(10, every=10), *records]))["loss_nonfinite"]

    assert skips(95, 99) == "warn"
    assert skips(95, 96) == "halt"


def test_an_overflow_that_a_loss_scaler_skips_is_no_fault() -> None:
    records = beats(30, skipped=0, loss_scale=1024.0)
    skip = beat(31, skipped=1, loss_scale=512.0, grad_norm=math.inf)
    assert found(judged([*records, skip])) == {}


def test_steps_skipped_again_and_again_in_a_trained_run_halt() -> None:
    records = beats(30, skipped=0, loss_scale=1024.0)
    skips = [beat(30 + n, skipped=n, loss_scale=1024.0 / 2**n) for n in range(1, 6)]
    assert found(judged([*records, *skips[:4]])) == {}
    assert found(judged([*records, *skips]))["loss_scale_falling"] == "halt"
    assert found(judged(skips)) == {}


def test_a_loss_that_vanishes_from_the_records_halts() -> None:
    assert found(judged([*beats(20), beat(21, loss=None)]))["loss_missing"] == "halt"
    assert found(judged([beat(n, loss=None) for n in range(1, 9)])) == {}


@pytest.mark.parametrize(
    ("losses", "grad", "level"),
    [
        ([5.0], 1.0, "warn"),
        ([5.0, 5.0], 9.0, "warn"),
        ([4.0, 5.0, 6.0], 5.0, "halt"),
        ([4.0, 5.0, 6.0], 1.0, "warn"),
        ([6.0, 4.0, 3.6], 5.0, "warn"),
        ([5.0] * 10, 1.0, "halt"),
        ([5.0, *[3.9] * 29], 1.0, "halt"),
    ],
)
def test_a_row_of_high_losses_halts_with_support_or_beyond_patience(
    losses, grad: float, level: str
) -> None:
    records = beats(40, every=10)
    high = [beat(410 + 10 * n, loss=loss, grad_norm=grad) for n, loss in enumerate(losses)]
    verdict = judged([*records, *high])
    assert found(verdict)["loss_jump"] == level
    assert "step 500" in next(f.sentence for f in verdict.findings if f.rule == "loss_jump")


def test_a_noisy_loss_is_no_jump() -> None:
    noisy = [beat(n, loss=7.5 + 1.5 * math.sin(n * n)) for n in range(1, 200)]
    assert "loss_jump" not in found(judged(noisy))


def test_a_loss_that_no_text_allows_so_early_is_a_leak() -> None:
    start = [beat(1, loss=11.0)]
    assert found(judged([*start, beat(2, loss=1e-6)])) == {"loss_too_good": "halt"}
    low = [beat(n, loss=1.2) for n in range(2, 5)]
    assert found(judged([*start, *low[:2]]))["loss_too_good"] == "warn"
    assert found(judged([*start, *low]))["loss_too_good"] == "halt"
    for nothing in (float("nan"), float("-inf")):  # below no limit
        assert "loss_too_good" not in found(judged([*start, beat(2, loss=nothing)]))


def test_a_low_loss_is_no_leak_late_or_from_trained_weights_or_without_text() -> None:
    low = [beat(1, loss=11.0), *(beat(n, loss=1.2) for n in range(2, 5))]
    assert found(judged(low, facts=RunFacts(bytes_per_token=4.0, fresh=False))) == {}
    assert found(judged(low, facts=RunFacts())) == {}
    late = [beat(1, loss=11.0), *(beat(n, loss=1.2) for n in range(2000, 2003))]
    assert "loss_too_good" not in found(judged(late))


def test_a_sudden_fall_long_after_the_start_asks_for_the_causality_probe() -> None:
    records = [*beats(60, first=1100, every=10), *beats(20, first=1700, every=5, loss=2.3)]
    verdict = judged(records)
    assert found(verdict) == {"loss_fall": "warn"}
    assert "causality probe" in verdict.sentence


@pytest.mark.parametrize("fields", [{"lr": 0.0}, {"grad_norm": 0.0}])
def test_what_cannot_learn_is_halted_on_the_third_record(fields: dict[str, float]) -> None:
    assert found(judged([*beats(20), *beats(2, first=21, **fields)])) == {}
    assert found(judged([*beats(20), *beats(3, first=21, **fields)])) == {"not_learning": "halt"}


def test_a_learning_rate_of_zero_at_the_end_of_the_schedule_is_right() -> None:
    end = [*beats(20, first=49_900), *beats(3, first=50_000, lr=0.0)]
    assert found(judged(end)) == {}
    early = [*beats(20, first=49_900), *beats(3, first=49_980, lr=0.0)]
    assert found(judged(early)) == {"not_learning": "halt"}


def gates(entropy, collapse: float = 0.0, highest: float = 0.5, count: int = 3):
    return [
        beat(n, gate_entropy_mean=entropy, gate_collapse_frac=collapse, gate_max_gate=highest)
        for n in range(30, 30 + count)
    ]


@pytest.mark.parametrize(
    ("figures", "level"),
    [
        ((1.0,), None), ((0.4,), "warn"), ((0.1,), "halt"), ((1.0, 0.2), "warn"),
        ((1.0, 0.6), "halt"), ((1.0, 0.0, 0.87), "warn"), ((1.0, 0.0, 0.95), "halt"),
    ],
)  # fmt: skip
def test_gates_are_judged_on_three_new_records(
    figures: tuple[float, ...], level: str | None
) -> None:
    assert found(judged([*beats(20), *gates(*figures)])).get("gates_collapsed") == level
    assert "gates_collapsed" not in found(judged([*beats(20), *gates(*figures, count=2)]))


def test_one_record_said_three_times_is_not_three_new_ones() -> None:
    same = [beat(30, gate_entropy_mean=0.01, alive_seq=n) for n in range(3)]
    assert found(judged([*beats(20), *same])) == {}


def test_a_slow_run_is_reported_after_ten_minutes_with_its_cause() -> None:
    fast = beats(30, tokens_per_s=1000.0, data_s=0.01)
    slow = beats(59, first=31, tokens_per_s=400.0, data_s=0.01)
    assert found(judged([*fast, *slow])) == {}
    verdict = judged([*fast, *slow, beat(90, tokens_per_s=400.0, data_s=0.8)])
    assert found(verdict) == {"throughput_low": "warn"}
    assert "waiting for data" in verdict.sentence
    held = beat(90, tokens_per_s=400.0, throttle="power cap", data_s=0.0)
    assert "power cap" in judged([*fast, *slow, held]).sentence
    free = beat(90, tokens_per_s=400.0, throttle="0x0000000000000000", data_s=0.0)
    assert "throttled" not in judged([*fast, *slow, free]).sentence


def test_a_run_that_is_slower_than_its_profile_expects_is_reported() -> None:
    expecting = LIMITS.model_copy(update={"expected_tokens_per_s": 1000.0})

    def told(rate: float, count: int = 30) -> Verdict:
        return judged(beats(count, tokens_per_s=rate, data_s=0.01), limits=expecting)

    assert found(told(810.0)) == {}
    assert found(told(790.0)) == {"throughput_low": "warn"}
    assert "79 % of the 1000 that its profile expects" in told(790.0).sentence
    assert found(told(790.0, count=10)) == {}
    assert found(judged(beats(30, tokens_per_s=1.0, data_s=0.01))) == {}


@pytest.mark.parametrize("place", ["the same heartbeats", "what a watchdog remembers"])
def test_the_rate_of_earlier_attempts_is_what_a_resumed_run_is_held_against(place: str) -> None:
    before = [beat(n, attempt=1, tokens_per_s=1000.0) for n in range(1, 31)]
    after = [beat(n, attempt=2, tokens_per_s=400.0) for n in range(31, 131)]
    first = Tracker(FACTS, 1)
    first.feed(before)
    if place == "the same heartbeats":
        tracker = Tracker(FACTS, 2)
        tracker.feed(before)
    else:
        tracker = Tracker(FACTS, 2, first.best_rate)
    tracker.feed(after)
    verdict = judge(tracker.evidence(after[-1].ts, ALIVE, MachineEvidence()), LIMITS)
    assert found(verdict) == {"throughput_low": "warn"}
    assert "40 % of the run's own median from before (1000 tokens/s)" in verdict.sentence
    assert tracker.best_rate == 1000.0


@pytest.mark.parametrize(
    ("fields", "level"),
    [({"dt_fetch_s": 3.0}, "warn"), ({"fetch_p95_ms": 150.0}, "warn"), ({"dt_fetch_s": 1.0}, None)],
)
def test_slow_data_is_reported_when_it_is_slow_each_time(
    fields: dict[str, float], level: str | None
) -> None:
    assert found(judged([*beats(20), *beats(3, first=21, **fields)])).get("data_slow") == level
    fast, twice = beats(20, dt_fetch_s=0.01, fetch_p95_ms=1.0), beats(2, first=21, **fields)
    assert "data_slow" not in found(judged([*fast, *twice]))
    assert "data_slow" not in found(judged([*beats(20), *twice, twice[-1]]))  # said again


def test_memory_that_keeps_growing_is_reported() -> None:
    def growing(slope: int):
        return found(judged([beat(n, gpu_mem_alloc=20_000 + slope * n) for n in range(1, 100)]))

    assert growing(0) == growing(5) == {}
    assert growing(50) == {"memory_creep": "warn"}


def test_low_disk_and_memory_are_reported() -> None:
    few = {"disk_free_bytes": 3 * GIB, "checkpoint_bytes": 2 * GIB}
    assert found(judged(beats(5), **few)) == {"disk_low": "warn"}
    small = judged(beats(5), disk_free_bytes=3 * 2**20, checkpoint_bytes=2 * 2**20)
    assert "3 MiB free, less than 2 checkpoints of 2 MiB" in small.sentence
    assert found(judged(beats(5), disk_free_bytes=5 * GIB, checkpoint_bytes=2 * GIB)) == {}
    assert found(judged(beats(5), host_memory_fraction=0.95)) == {"host_memory_high": "warn"}


def test_a_fall_of_the_loss_is_reported_over_the_distance_that_its_limit_names() -> None:
    def fall(every: int, within: int) -> Verdict:
        high = beats(40, first=2000, every=every, loss=3.0)
        first = high[-1].step + every
        return judged([*high, *beats(within, first=first, every=every, loss=2.42)])

    assert found(fall(10, 11)) == {"loss_fall": "warn"}
    assert "within 100 steps" in fall(10, 11).sentence
    assert "within 90 steps" in fall(30, 12).sentence
    assert "loss_fall" not in found(fall(200, 12))  # further apart than the limit: not judged


def test_a_lucky_stretch_is_no_level_that_a_run_must_beat_again() -> None:
    def run(lucky: int):
        return [
            beat(step, loss=3.0 - step / 1e5 - (0.1 if 4000 <= step < 4000 + lucky else 0))
            for step in range(20, 8000, 20)
        ]

    assert found(judged(run(20 * 20))) == {}
    assert found(judged(run(20 * 60))) == {"loss_plateau": "warn"}


def test_a_plateau_and_a_spike_of_the_gradient_only_warn() -> None:
    def flat(count: int):
        return found(judged([*beats(20), *beats(count, first=40, every=40)]))

    assert (flat(20), flat(30)) == ({}, {"loss_plateau": "warn"})
    assert found(judged([*beats(30), beat(31, grad_norm=50.0)])) == {"grad_spike": "warn"}


def test_a_new_attempt_is_judged_on_its_own() -> None:
    tracker = Tracker(FACTS, 2)
    tracker.feed([beat(n, loss=math.nan) for n in range(1, 9)])
    assert tracker.evidence(0.0, ALIVE, MachineEvidence()).records == ()


def test_bytes_per_token_come_from_the_configuration() -> None:
    assert facts_of(RunConfig(), fresh=True).bytes_per_token > 4
    synthetic = RunConfig.model_validate({"data": {"source": "synthetic"}})
    assert facts_of(synthetic, fresh=True).bytes_per_token is None


def test_the_worst_finding_is_the_verdict_and_the_others_follow() -> None:
    verdict = judged([*beats(20), *beats(2, first=21, loss=math.nan, dt_fetch_s=50.0)])
    assert (verdict.level, verdict.rule) == ("halt", "loss_nonfinite")
    assert {"loss_nonfinite", "data_slow"} == found(verdict).keys()
    assert LIMITS.nonfinite_in_row == 2


def test_a_row_far_above_its_level_needs_no_gradient_norm_to_halt() -> None:
    records = beats(40, every=10, grad_norm=None)
    twice = [beat(410 + 10 * n, loss=6.5, grad_norm=None) for n in range(3)]
    assert found(judged([*records, *twice[:2]]))["loss_jump"] == "warn"
    assert found(judged([*records, *twice]))["loss_jump"] == "halt"
    thrice = [beat(410 + 10 * n, loss=9.5, grad_norm=None) for n in range(2)]
    assert found(judged([*records, *thrice[:1]]))["loss_jump"] == "warn"
    assert found(judged([*records, *thrice]))["loss_jump"] == "halt"


@pytest.mark.parametrize(
    ("step", "loss", "norm", "halts"),
    [(9010, 11.95, 44.0, True), (9010, 11.95, 8.0, False), (9010, 9.0, 44.0, False),
     (50, 11.95, 44.0, False)],
)  # fmt: skip
def test_a_loss_above_random_weights_with_its_gradient_halts_at_once(
    step: int, loss: float, norm: float, halts: bool
) -> None:
    records = [beat(step - 10, loss=6.4, grad_norm=2.0), beat(step, loss=loss, grad_norm=norm)]
    assert found(judged(records)).get("loss_exploded") == ("halt" if halts else None)


def test_the_loss_of_random_weights_is_that_of_the_vocabulary() -> None:
    byte = RunFacts(uniform_nats=math.log(320), bytes_per_token=1.0)
    records = [beat(9000, loss=1.2, grad_norm=0.3), beat(9010, loss=6.5, grad_norm=9.0)]
    assert found(judged(records, facts=byte))["loss_exploded"] == "halt"
    assert "loss_exploded" not in found(judged(records))


@pytest.mark.parametrize(("height", "level"), [(0.3, None), (0.7, "warn"), (1.3, "halt")])
def test_a_loss_that_climbs_too_slowly_to_jump_warns_and_then_halts(
    height: float, level: str | None
) -> None:
    climbing = [
        beat(step, loss=2.8 + min(height, 0.002 * max(0, step - 2000)), grad_norm=None)
        for step in range(10, 2900, 10)
    ]
    assert found(judged(climbing)).get("loss_climbing") == level
    back = [beat(step, loss=2.8 + height / 3) for step in range(2900, 2920, 10)]
    assert "loss_climbing" not in found(judged([*climbing, *back]))


@pytest.mark.parametrize("losses", [(6.41, 11.95, 12.1), (6.41, 6.3, 11.2, 11.3)])
def test_a_second_loss_above_random_weights_halts_without_any_gradient_norm(
    losses: tuple[float, ...],
) -> None:
    records = [beat(9000 + 10 * n, loss=loss, grad_norm=None) for n, loss in enumerate(losses)]
    assert "loss_exploded" not in found(judged(records[:-1]))
    assert found(judged(records))["loss_exploded"] == "halt"


def test_a_second_loss_at_three_times_the_first_one_needs_no_calm_records() -> None:
    def rise(*losses, facts=FACTS):
        records = [beat(25 * n, loss=loss) for n, loss in enumerate(losses, start=1)]
        return found(judged(records, facts=facts)).get("loss_exploded")

    assert rise(1.4, 4.3, 6.1) == "halt"
    assert (rise(1.4, 4.3), rise(1.4, 4.3, 1.9), rise(0.2, 0.7, 0.9)) == (None, None, None)
    assert rise(67.0, 220.0, 240.0, facts=RunFacts()) is None  # no loss of a language model


@pytest.mark.parametrize("level", [1.2, 4.0])
def test_a_fall_after_standing_still_asks_for_the_causality_probe_at_any_step(level: float) -> None:
    still = beats(45, first=10, every=10, loss=level)
    falling = [beat(460 + 10 * n, loss=level * 0.96**n) for n in range(1, 11)]
    assert "loss_fall" not in found(judged([*still, *falling[:3]]))
    assert found(judged([*still, *falling]))["loss_fall"] == "warn"


def validations(*losses):
    return [beat(500 * n, msg="eval", val_loss=loss) for n, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "level"),
    [
        ([2.4, 2.3, 2.2], None),
        ([2.4, 2.3, 2.2, 2.25, 2.28], None),
        ([2.4, 2.2, 2.8], "warn"),
        ([2.3, 2.2, 2.4, 2.5], None),
        ([2.3, 2.2, 2.4, 2.5, 2.6], "warn"),
        ([2.3, 2.2, 2.8, 2.8, 2.2], None),
    ],
)
def test_a_validation_above_the_best_warns_when_it_is_high_or_lasts(
    losses: list[float], level: str | None
) -> None:
    assert found(judged(validations(*losses))).get("validation_rising") == level


def test_a_rising_validation_halts_only_by_policy() -> None:
    strict = WatchdogLimits(validation_halt_in_row=3)
    rising = validations(2.2, 3.2, 4.2, 5.2)
    assert found(judged(rising))["validation_rising"] == "warn"
    assert found(judged(rising, limits=strict))["validation_rising"] == "halt"


def test_a_long_run_may_be_slower_to_get_better_than_a_short_one() -> None:
    short = [*beats(40, every=10), *beats(150, first=410, every=10, loss=3.01)]
    long = [*beats(40, first=20_000, every=10), *beats(150, first=20_410, every=10, loss=3.01)]
    assert found(judged(short)) == {"loss_plateau": "warn"}
    assert found(judged(long)) == {}


def test_a_rate_that_five_records_showed_stays_the_reference() -> None:
    quick = beats(5, every=100, tokens_per_s=50_000.0)
    slow = beats(100, first=600, every=100, tokens_per_s=10_000.0)
    assert found(judged([*quick, *slow]))["throughput_low"] == "warn"


def test_a_learning_rate_of_0_for_longer_than_is_kept_is_still_a_schedule_that_ended() -> None:
    ended = [*beats(20), *beats(300, first=21, lr=0.0)]
    assert "not_learning" not in found(judged(ended, facts=RunFacts()))


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu_mem_alloc": 10**400, "host_rss_mib": 10**400}, {"progress_seq": 10**400},
        {"step": 10**400}, {"ts": math.inf}, {"tokens_per_s": -1.0}, {"tokens_per_s": math.nan},
    ],
)  # fmt: skip
def test_figures_that_are_none_end_no_judgement(fields: dict[str, float]) -> None:
    records = [beat(step).model_copy(update=fields) for step in range(1, 61)]
    tracker = Tracker(FACTS, 1)
    tracker.feed(records)
    evidence = tracker.evidence(600.0, ALIVE, MachineEvidence())
    assert judge(evidence, LIMITS).level != "halt"
    newest = figures_of(evidence, LIMITS).record
    assert newest is None or newest.step <= 60


def test_gradient_norms_whose_median_is_0_are_no_spike() -> None:
    assert "grad_spike" not in found(
        judged([beat(n, grad_norm=g) for n, g in enumerate((-1, 1, 5), 1)])
    )
