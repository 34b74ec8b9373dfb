import itertools

import pytest

from nsa_core.config.training import ScheduleConfig
from nsa_core.train.schedule import learning_rate_scale


def scales(**fields):
    schedule = ScheduleConfig(**fields)
    return [learning_rate_scale(step, schedule) for step in range(schedule.steps)]


def test_warm_up_rises_in_equal_steps_to_the_peak():
    assert scales(steps=10, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_the_very_first_step_learns():
    assert scales(steps=10, warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_the_last_optimizer_step_has_exactly_the_final_rate(kind, ratio):
    assert scales(steps=200, kind=kind, warmup_steps=20, min_ratio=ratio)[-1] == pytest.approx(
        ratio, abs=1e-12
    )


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_after_warm_up_the_rate_never_rises(kind):
    after = scales(steps=100, kind=kind, warmup_steps=10)[10:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))


def test_wsd_is_stable_until_its_decay():
    found = scales(steps=100, kind="wsd", warmup_steps=10, decay_fraction=0.2)
    assert found[9:80] == [1.0] * 71
    assert found[81] < 1.0


def test_a_schedule_that_is_all_warm_up_is_no_error():
    assert scales(steps=4, warmup_steps=8) == [0.125, 0.25, 0.375, 0.5]


#: Warm-up of 4 of 20 steps to 1; then each kind as its formula says, worked out by hand or in
#: degrees: the cosine goes through 12 degrees a step, from 0 at step 4 to 180 at step 19.
WARM_UP = [0.25, 0.5, 0.75, 1.0]
BY_FORMULA = {
    "cosine": [
        1.0, 0.990166, 0.961095, 0.914058, 0.851109, 0.775, 0.689058, 0.597038, 0.502962, 0.410942,
        0.325, 0.248891, 0.185942, 0.138905, 0.109834, 0.1,
    ],
    "wsd": [1.0] * 11 + [0.82, 0.64, 0.46, 0.28, 0.1],
    "constant": [1.0] * 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_FORMULA)
def test_twenty_steps_have_the_rates_of_the_formula(kind):
    found = scales(steps=20, kind=kind, warmup_steps=4, decay_fraction=0.25, min_ratio=0.1)
    assert found == pytest.approx(WARM_UP + BY_FORMULA[kind], abs=1e-6)


def test_a_decay_that_would_begin_in_the_warm_up_begins_after_it():
    found = scales(steps=11, kind="wsd", warmup_steps=5, decay_fraction=0.9, min_ratio=0.0)
    assert found[4:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1e-12)


def test_beyond_its_end_a_schedule_keeps_the_final_rate():
    for kind in ("cosine", "wsd"):
        schedule = ScheduleConfig(steps=10, kind=kind, warmup_steps=2, min_ratio=0.3)
        assert learning_rate_scale(25, schedule) == pytest.approx(0.3)
