import pytest

from nsa_core.train.goodput import Goodput, GoodputClock, read_goodput, start_clock, write_goodput


class FakeTime:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def fake():
    return FakeTime()


def make_clock(fake, buckets=None, began=1000.0):
    return GoodputClock(began, buckets or {}, wall=fake, ticks=fake)


def test_every_second_is_in_one_bucket(fake):
    clock = make_clock(fake)
    fake.now += 5
    clock.switch("step")
    fake.now += 7
    with clock.within("eval"):
        fake.now += 3
    fake.now += 1
    found = clock.read(attempt=1, step=9)
    seconds = {name: value for name, value in found.buckets.items() if value}
    assert seconds == {"init": 5, "step": 8, "eval": 3}
    assert sum(found.buckets.values()) == found.wall_s == 16


def test_a_rollback_moves_step_seconds_to_what_was_lost(fake):
    clock = make_clock(fake, {"step": 100.0}, began=900.0)
    clock.lose_steps(60.0)
    found = clock.read(attempt=2, step=6)
    assert (found.buckets["step"], found.buckets["rollback_lost"]) == (60, 40)
    assert sum(found.buckets.values()) == found.wall_s


def test_an_error_inside_a_bucket_goes_back_to_the_bucket_before(fake):
    clock = make_clock(fake)
    with pytest.raises(ZeroDivisionError), clock.within("eval"):
        _ = 1 / 0
    fake.now += 2
    assert clock.seconds("init") == 2


def test_the_sum_equals_wall_time_across_attempts(run, monkeypatch):
    before = Goodput(
        began_unix_s=1000.0,
        updated_unix_s=1100.0,
        attempt=1,
        step=10,
        buckets={"step": 90.0, "init": 10.0},
        wall_s=100.0,
        goodput=0.9,
    )
    write_goodput(run, before)
    monkeypatch.setattr("time.time", lambda: 1200.0)
    clock = start_clock(run, launched_unix_s=1190.0, last_alive_unix_s=1130.0)
    clock.lose_steps(80.0)
    found = clock.read(attempt=2, step=8)
    assert found.buckets["down"] == 70
    assert found.buckets["rollback_lost"] == 30 + 10
    assert abs(sum(found.buckets.values()) - (1200.0 - 1000.0)) < 1


def test_a_damaged_record_begins_a_new_one(run):
    run.goodput.write_text("{")
    assert read_goodput(run) is None
