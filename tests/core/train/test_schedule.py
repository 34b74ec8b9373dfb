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
