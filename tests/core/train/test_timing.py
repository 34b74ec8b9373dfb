import pytest

from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.goodput import Goodput, read_goodput, record_hang, write_goodput
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import write_manifest
from nsa_core.train.timing import GoodputClock, Meter, start_clock


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


def make_record(run, buckets):
    """The last record of attempt 1, from 1000 to 1100."""
    record = Goodput(
        began_unix_s=1000.0, updated_unix_s=1100.0, attempt=1, step=10, buckets=buckets,
        wall_s=100.0, goodput=0.9,
    )  # fmt: skip
    write_goodput(run, record)


def test_the_sum_equals_wall_time_across_attempts(run, monkeypatch):
    make_record(run, {"step": 90.0, "init": 10.0})
    monkeypatch.setattr("time.time", lambda: 1200.0)
    clock = start_clock(run, attempt=2, last_alive_unix_s=1130.0)
    clock.lose_steps(80.0)
    found = clock.read(attempt=2, step=8)
    assert found.buckets["down"] == 70
    assert found.buckets["rollback_lost"] == 30 + 10
    assert abs(sum(found.buckets.values()) - (1200.0 - 1000.0)) < 1
    assert found.began_unix_s == 1000.0


@pytest.mark.parametrize("now", [400.0, 1050.0, 1110.0])
def test_a_clock_that_was_set_back_takes_no_second_from_any_bucket(run, monkeypatch, now):
    make_record(run, {"step": 90.0, "init": 10.0})
    monkeypatch.setattr("time.time", lambda: now)
    clock = start_clock(run, attempt=2, last_alive_unix_s=1130.0)
    found = clock.read(attempt=2, step=8)
    assert min(found.buckets.values()) >= 0
    assert found.buckets["rollback_lost"] == 30
    assert abs(sum(found.buckets.values()) - found.wall_s) < 1


def test_the_time_before_the_first_record_is_by_the_clock_of_the_pod(run, manifest):
    """The manifest says when the laptop launched it, by a clock that may be hours off."""
    write_manifest(run, manifest.model_copy(update={"created_unix_s": 5.0}))
    found = start_clock(run, attempt=1, last_alive_unix_s=None).read(attempt=1, step=0)
    assert 0 <= found.buckets["provision"] < 60


def test_a_damaged_record_begins_a_new_one(run):
    run.goodput.write_text("{")
    assert read_goodput(run) is None


def write_beats(run, *moments):
    """Heartbeats of attempt 1, each a progress number and a time."""
    run.heartbeat().write_text(
        "".join(
            Heartbeat(
                run_id="r1", attempt=1, rank=0, pid=1, ts=ts, iso="", msg="beat", phase="train",
                alive_seq=int(ts), progress_seq=progress_seq, step=progress_seq,
            ).model_dump_json() + "\n"
            for progress_seq, ts in moments
        )
    )  # fmt: skip


HUNG = ExitRecord(
    run_id="r1", attempt=1, code=16, reason="hung", step=2, checkpoint_step=None, at=1280.0,
    by="watchdog",
)  # fmt: skip
MOMENTS = {
    "a spinning loop, whose heartbeats go on": [(1, 1110.0), (2, 1120.0), (2, 1130.0), (2, 1250.0)],
    "a stopped process, whose heartbeats stop": [(1, 1110.0), (2, 1120.0)],
}


@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)
def test_the_time_that_a_hung_loop_stood_still_is_hang_up_to_its_end(run, monkeypatch, moments):
    make_record(run, {"step": 100.0})
    write_beats(run, *moments)
    record_hang(run, HUNG)
    record_hang(run, HUNG)
    found = read_goodput(run)
    assert (found.buckets["rollback_lost"], found.buckets["hang"]) == (20.0, 160.0)
    assert found.wall_s == sum(found.buckets.values()) == 280.0
    kept = RunDir(run.attempt(1))
    kept.root.mkdir(parents=True)
    write_exit(kept, HUNG)
    monkeypatch.setattr("time.time", lambda: 1300.0)
    for is_recorded in (True, False):
        if not is_recorded:
            make_record(run, {"step": 100.0})
        clock = start_clock(run, attempt=2, last_alive_unix_s=moments[-1][1])
        found = clock.read(attempt=2, step=10).buckets
        assert (found["rollback_lost"], found["hang"], found["down"]) == (20.0, 160.0, 20.0)


def test_an_end_that_is_not_a_hang_adds_no_hang_time(run):
    make_record(run, {"step": 100.0})
    write_beats(run, (1, 1110.0), (1, 1250.0))
    record_hang(run, HUNG.model_copy(update={"code": 75}))
    assert read_goodput(run).buckets == {"step": 100.0}


def test_the_share_of_the_peak_is_that_of_the_cards_of_all_ranks():
    assert Meter(10.0, 1000.0, num_ranks=4).mfu(200.0) == pytest.approx(0.5)
