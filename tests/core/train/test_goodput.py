import pytest

from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.train.goodput import Goodput, GoodputClock, read_goodput, start_clock, write_goodput
from nsa_core.train.heartbeat import read_hung_since


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
    assert found.began_unix_s == 1000.0


def test_a_damaged_record_begins_a_new_one(run):
    run.goodput.write_text("{")
    assert read_goodput(run) is None


def test_the_time_that_a_hung_loop_stood_still_is_hang_and_not_lost_training(run, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1300.0)
    write_goodput(
        run,
        Goodput(
            began_unix_s=1000.0, updated_unix_s=1100.0, attempt=1, step=10,
            buckets={"step": 100.0}, wall_s=100.0, goodput=1.0,
        ),
    )  # fmt: skip
    clock = start_clock(
        run, launched_unix_s=1290.0, last_alive_unix_s=1250.0, hung_since_unix_s=1120.0
    )
    found = clock.read(attempt=2, step=10).buckets
    assert (found["rollback_lost"], found["hang"], found["down"]) == (20.0, 130.0, 50.0)


def test_a_hang_begins_where_the_loop_moved_last(run):
    def beat(progress_seq, ts):
        return Heartbeat(
            run_id="r1", attempt=1, rank=0, pid=1, ts=ts, iso="", msg="beat", phase="train",
            alive_seq=int(ts), progress_seq=progress_seq, step=progress_seq,
        ).model_dump_json()  # fmt: skip

    lines = [beat(1, 10.0), beat(2, 20.0), beat(2, 30.0), beat(2, 40.0)]
    run.heartbeat().write_text("\n".join(lines) + "\n")
    assert read_hung_since(run, 1) is None
    kept = RunDir(run.attempt(1))
    kept.root.mkdir(parents=True)
    record = ExitRecord(
        run_id="r1", attempt=1, code=16, reason="hung", step=2, checkpoint_step=None, at=41.0,
        by="watchdog",
    )  # fmt: skip
    write_exit(kept, record)
    assert read_hung_since(run, 1) == 20.0
    write_exit(kept, record.model_copy(update={"code": 75}))
    assert read_hung_since(run, 1) is None
