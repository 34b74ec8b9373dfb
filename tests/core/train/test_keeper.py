import time

import pytest

from nsa_core.config.training import CheckpointConfig
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.checkpoint import CheckpointManifest, list_checkpoints
from nsa_core.rundir.events import read_events
from nsa_core.train import keeper as keeper_module
from nsa_core.train.checkpoint_files import CheckpointWriteError, write_checkpoint
from nsa_core.train.failure import DiskFullError
from nsa_core.train.keeper import (
    CheckpointKeeper,
    apply_retention,
    find_known_good,
    write_known_good,
)
from nsa_core.train.resume import note_beginning
from nsa_core.train.timing import GoodputClock
from tests.core.train import sessions
from tests.core.train.test_checkpoint import ORIGIN, snapshot, write
from tests.core.train.thread_ranks import ThreadRank, run_both


@pytest.mark.parametrize(
    ("config", "known_good", "removed"),
    [
        (CheckpointConfig(keep_last=2), None, [20, 10]),
        (CheckpointConfig(keep_last=1, keep_every=20), None, [30, 10]),
        (CheckpointConfig(keep_last=1), 10, [30, 20]),
    ],
)
def test_the_newest_every_mth_and_the_last_known_good_are_kept(run, config, known_good, removed):
    for step in (10, 40, 20, 30):
        folder = run.checkpoint(step)
        folder.mkdir(parents=True)
        manifest = CheckpointManifest(
            run_id="r1", attempt=1, step=step, tokens_seen=0, created_unix_s=0.0,
            config_sha256="", files=[],
        )  # fmt: skip
        write_text(folder / "checkpoint.json", manifest.model_dump_json())
    assert list(apply_retention(run, config, known_good)) == removed
    assert {one.step for one in list_checkpoints(run)} == {10, 20, 30, 40} - set(removed)


def test_fifty_clean_steps_make_a_checkpoint_known_good():
    assert find_known_good([100, 120], 149, None) is None
    assert find_known_good([100, 120], 150, None) == 100
    assert find_known_good([100, 120], 170, None) == 120


def test_an_anomaly_after_a_checkpoint_keeps_it_from_being_known_good():
    assert find_known_good([100, 120], 200, 110) == 120
    assert find_known_good([100], 200, 110) is None


def test_an_abandoned_future_goes_once_a_known_good_checkpoint_has_passed_it(run):
    for name in ("aside_attempt2_step_000040", "aside_attempt2_step_000040_again",
                 "aside_attempt2_step_000060", "aside_of_mine"):  # fmt: skip
        (run.checkpoints / name).mkdir(parents=True)
    assert list(apply_retention(run, CheckpointConfig(keep_last=1), 30)) == []
    assert len(list(run.checkpoints.iterdir())) == 4
    assert list(apply_retention(run, CheckpointConfig(keep_last=1), 50)) == []
    left = sorted(folder.name for folder in run.checkpoints.iterdir())
    assert left == ["aside_attempt2_step_000060", "aside_of_mine"]


class Disk:
    """Writes checkpoints while it has room."""

    def __init__(self):
        self.has_room = True

    def write(self, *inputs):
        if not self.has_room:
            message = "No space left on device"
            raise CheckpointWriteError(message, is_disk_full=True)
        return write_checkpoint(*inputs)


@pytest.fixture
def disk(monkeypatch):
    made = Disk()
    monkeypatch.setattr(keeper_module, "write_checkpoint", made.write)
    return made


@pytest.fixture(params=[True, False], ids=["background", "in the loop"])
def keeper(run, telemetry, disk, request):
    config = CheckpointConfig(save_every=10, keep_last=2, background=request.param)
    return CheckpointKeeper(run, config, ORIGIN, telemetry, GoodputClock(0.0, {}))


def save(keeper, step, *, wait=True):
    keeper.save(lambda: snapshot(step), step, wait=wait)


def kinds(run):
    return [event.kind for event in read_events(run)]


def test_a_save_is_an_event_with_its_stall(keeper, run):
    save(keeper, 10)
    event = read_events(run)[0]
    assert event.kind == "saved"
    assert event.facts["stall_s"] >= 0
    assert keeper.statistics.num_saved == 1


def test_the_same_step_is_saved_once_even_while_its_write_is_under_way(keeper, run):
    save(keeper, 10, wait=False)
    save(keeper, 10)
    assert kinds(run) == ["saved"]


def test_older_ones_go_after_a_newer_one_is_whole(keeper, run):
    for step in (10, 20, 30):
        save(keeper, step)
    assert [c.step for c in list_checkpoints(run)] == [30, 20]


def test_an_older_one_that_has_lost_its_name_is_no_good_one_though_its_files_stay(
    run, telemetry, monkeypatch
):
    def refuse(folder):
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(keeper_module.shutil, "rmtree", refuse)
    config = CheckpointConfig(save_every=10, keep_last=1, background=False)
    keeper = CheckpointKeeper(run, config, ORIGIN, telemetry, GoodputClock(0.0, {}))
    for step in (10, 20):
        save(keeper, step)
    assert [c.step for c in list_checkpoints(run)] == [20]
    assert keeper.find_good(first_bad_step=15) is None


def test_a_failed_save_is_an_event_and_the_run_continues_while_the_last_one_is_young(
    keeper, disk, run
):
    save(keeper, 10)
    disk.has_room = False
    for step in (20, 30, 40):
        save(keeper, step, wait=False)
        keeper.settle(wait=True)
    assert kinds(run).count("save_failed") == 3
    assert "continues until" in read_events(run)[-1].message


def test_a_last_checkpoint_that_is_too_old_halts_the_run(keeper, disk):
    save(keeper, 10)
    disk.has_room = False
    save(keeper, 50, wait=False)
    with pytest.raises(DiskFullError) as ended:
        keeper.settle(wait=True)
    assert ended.value.code == 10
    assert "step 10" in str(ended.value)


def test_a_save_that_a_signal_asked_for_may_fail_where_none_is_due(run, telemetry, disk):
    """The run would lose all that it has done so far; its end saves in any case."""
    config = CheckpointConfig(save_every=0, background=False)
    keeper = CheckpointKeeper(run, config, ORIGIN, telemetry, GoodputClock(0.0, {}))
    disk.has_room = False
    save(keeper, 500, wait=False)
    keeper.settle(wait=True)
    assert read_events(run)[-1].message.endswith("last whole checkpoint: none; the run continues")
    with pytest.raises(DiskFullError):
        save(keeper, 900)


def test_the_last_save_of_a_run_may_not_fail_silently(keeper, disk):
    disk.has_room = False
    with pytest.raises(DiskFullError) as ended:
        save(keeper, 10)
    assert ended.value.code == 93


def test_a_whole_checkpoint_counts_though_latest_cannot_name_it(keeper, run):
    """On a full disk the last file that is written may be the one without room."""
    run.latest.mkdir(parents=True)
    save(keeper, 10)
    assert kinds(run) == ["saved"]
    assert (keeper.whole_step, keeper.statistics.num_failed) == (10, 0)


def test_a_disk_with_room_again_is_used_again(keeper, disk, run):
    disk.has_room = False
    save(keeper, 10, wait=False)
    keeper.settle(wait=True)
    disk.has_room = True
    save(keeper, 20)
    assert [c.step for c in list_checkpoints(run)] == [20]


def test_fifty_clean_steps_make_a_checkpoint_known_good_and_keep_it(keeper, run):
    save(keeper, 10)
    keeper.mark_known_good(60)
    assert run.known_good.read_text() == "step_000010\n"
    for step in (70, 80, 90):
        save(keeper, step)
    assert [c.step for c in list_checkpoints(run)] == [90, 80, 10]


def test_a_bug_in_the_writer_reaches_the_loop(keeper, monkeypatch):
    def broken(*inputs):
        raise ZeroDivisionError

    monkeypatch.setattr(keeper_module, "write_checkpoint", broken)
    with pytest.raises(ZeroDivisionError):
        save(keeper, 10)


@pytest.mark.parametrize(("begun_at", "is_own"), [(0, False), (10, True), (19, True), (20, False)])
def test_a_known_good_checkpoint_of_an_abandoned_future_no_longer_counts(
    run, telemetry, disk, keeper, begun_at, is_own
):
    save(keeper, 20)
    write_known_good(run, 20)
    resumed = CheckpointKeeper(
        run,
        CheckpointConfig(save_every=10, keep_last=2, background=False),
        ORIGIN,
        telemetry,
        GoodputClock(0.0, {}),
    )
    aside = run.checkpoint(20).rename(run.checkpoints / "aside_attempt2_step_000020")
    resumed.begin_at(begun_at, None, is_own=is_own)
    assert resumed.find_good(first_bad_step=15) is None
    save(resumed, begun_at + 2)
    assert aside.is_dir(), "the first save of the new life removes nothing of the old one"


@pytest.mark.parametrize("background", [True, False])
def test_ranks_wait_for_a_slow_disk_of_the_first_one_longer_than_a_collective(
    run, telemetry, monkeypatch, background
):
    def slow(*inputs):
        time.sleep(2 * ThreadRank.timeout_s)
        return write_checkpoint(*inputs)

    def act(group):
        keeper = CheckpointKeeper(
            run, config, ORIGIN, telemetry, GoodputClock(0.0, {}), group,
            rank_deadline_s=ThreadRank.timeout_s,
        )  # fmt: skip
        for step in (10, 20):
            keeper.save(lambda step=step: snapshot(step) if group.is_first else None, step)
            assert group.add_up([1]) == [2]
        keeper.drain()

    monkeypatch.setattr(keeper_module, "write_checkpoint", slow)
    config = CheckpointConfig(save_every=10, keep_last=2, background=background)
    assert run_both(act) == [None, None]
    assert [one.step for one in list_checkpoints(run)] == [20, 10]


def test_a_checkpoint_of_the_same_step_from_another_past_makes_room_for_a_new_one(
    run, manifest, telemetry
):
    """A run stopped before its first step, began afresh, and is stopped there again."""
    write(run, 0)
    clock = GoodputClock(0.0, {})
    keeper = CheckpointKeeper(run, manifest.config.checkpoint, ORIGIN, telemetry, clock)
    with sessions.attempt(run) as context:
        note_beginning(context, clock, keeper, None)
    assert keeper.find_good(first_bad_step=1) is None
    keeper.save(lambda: snapshot(0), 0, wait=True)
    assert [event.kind for event in read_events(run)] == ["set_aside", "saved"]
    assert [one.step for one in list_checkpoints(run)] == [0]
