"""A checkpoint that several ranks write is whole or not there, and loads into any other number."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nsa_core.config.run import RunConfig
from nsa_core.env import RankEnvironment
from nsa_core.model.stored_tensors import find_stored, read_stored
from nsa_core.model.weights import model_tensors
from nsa_core.rundir import atomic
from nsa_core.rundir.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    Checkpoint,
    inspect_checkpoint,
    list_checkpoints,
)
from nsa_core.rundir.checkpoint_shards import CheckpointShard, TensorRows, find_shard_fault
from nsa_core.rundir.process import identify
from nsa_core.rundir.ranks import RankProcess, write_rank_process
from nsa_core.train import checkpoint_files as content
from nsa_core.train import sharded_save
from nsa_core.train.group import RankGroup
from nsa_core.train.learner import Learner
from nsa_core.train.random_state import read_random_state, seed_everything, spread_random
from nsa_core.train.resume import find_resume_point, restore
from nsa_core.train.sharded_save import SharedSave
from tests.core.train.models import CPU, make_batches, make_model, make_steps, no_poll, same
from tests.core.train.shards import part, part_of, rows_of, save_together
from tests.core.train.test_checkpoint import ORIGIN

SAVE = SharedSave(1, deadline_s=20.0)
SOON = SharedSave(2, deadline_s=0.2)
TOKENIZER = SimpleNamespace(name="byte", fingerprint="tokens")


@pytest.fixture
def learner():
    model = make_model(seed=3)
    steps = make_steps(model)
    steps.run(make_batches(1), no_poll)
    return Learner(model, steps)


def whole(learner, step=5):
    return content.TrainingSnapshot(
        state=content.TrainingState(step=step, tokens_seen=step * 10, loader={}),
        config=RunConfig(),
        model=content.to_host(model_tensors(learner.model)),
        optimizer=content.to_host(learner.steps.optimizers.state_tensors()),
        random={0: read_random_state(CPU)},
    )


def parts(snapshot, num_ranks):
    return [part(snapshot, rank, num_ranks) for rank in range(num_ranks)]


def left_in(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_three_ranks_write_one_checkpoint_that_every_reader_calls_whole(run, manifest, learner):
    saved = save_together(run, parts(whole(learner), 3), ORIGIN, SAVE)
    assert [one.path.name for one in saved] == ["step_000005"] * 3
    assert left_in(run) == ["latest", "step_000005"]
    assert run.latest.read_text() == "step_000005\n"
    (checkpoint,) = list_checkpoints(run)
    assert checkpoint.manifest.num_shards == 3
    assert not inspect_checkpoint(checkpoint.path).damage
    assert {file.name for file in checkpoint.manifest.files} == {
        "state.json", "config.json",
        *(f"{name}_rank{rank}.{ending}" for rank in range(3) for name, ending in (
            ("model", "safetensors"), ("optimizer", "safetensors"), ("shard", "json"),
            ("random", "safetensors"), ("random", "json"),
        )),
    }  # fmt: skip


@pytest.mark.parametrize("num_written", [1, 2, 5])
@pytest.mark.parametrize("num_read", [1, 2, 3, 40])
def test_rows_come_back_bit_for_bit_in_any_other_number_of_ranks(
    run, learner, num_written, num_read
):
    snapshot = whole(learner)
    if num_written == 1:
        checkpoint = content.write_checkpoint(run, snapshot, ORIGIN)
    else:
        checkpoint = save_together(run, parts(snapshot, num_written), ORIGIN, SAVE)[0]
    for name, tensors in ((MODEL_FILE, snapshot.model), (OPTIMIZER_FILE, snapshot.optimizer)):
        stored = find_stored(checkpoint.path, checkpoint.manifest, name)
        assert same(read_stored(stored), tensors)
        for rank in range(num_read):
            rows = rows_of(tensors, rank, num_read)
            wanted = {tensor: stored[tensor] for tensor in rows}
            assert same(read_stored(wanted, rows), part_of(tensors, rows))


def test_a_resume_in_one_rank_goes_on_as_from_a_whole_checkpoint(run, manifest, learner):
    save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    expected = learner.steps.run(make_batches(1, seed=1), no_poll)
    point = find_resume_point(run, manifest, lambda folder, damage: pytest.fail(damage))
    model = make_model(seed=9)
    resumed = Learner(model, make_steps(model))
    restore(point, resumed, TOKENIZER, CPU, RankGroup())
    assert resumed.steps.run(make_batches(1, seed=1), no_poll) == expected
    assert same(model_tensors(model), model_tensors(learner.model))


def test_a_rank_gets_its_own_generators_and_one_that_is_new_none(run, learner):
    states = {rank: drawn_once(rank) for rank in range(2)}
    written = content.write_checkpoint(run, replace(whole(learner), random=states), ORIGIN)
    kept = content.read_random(written.path, written.manifest)
    groups = [RankGroup(RankEnvironment(rank=rank)) for rank in range(3)]
    found = [spread_random(group, kept) for group in groups]
    assert found[2] is None
    for rank in range(2):
        assert found[rank].tensors["cpu"].equal(states[rank].tensors["cpu"])
    assert [one.words for one in found[:2]] == [states[0].words, states[1].words]


def drawn_once(rank):
    seed_everything(7, rank)
    torch.rand(1)
    return read_random_state(CPU)


def test_ranks_are_seeded_apart():
    assert len({drawn_once(rank).tensors["cpu"].numpy().tobytes() for rank in range(3)}) == 3


def test_a_rank_that_stays_away_fails_the_save_and_the_one_before_stays(run, learner):
    save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    (failed,) = save_together(run, parts(whole(learner, 7), 2)[:1], ORIGIN, SOON)
    assert isinstance(failed, content.CheckpointWriteError)
    assert "rank 1 did not do its part within 0.2 s" in str(failed)
    (late,) = save_together(run, parts(whole(learner, 7), 2)[1:], ORIGIN, SOON)
    assert "rank 0 gave up its part" in str(late)
    assert [one.step for one in list_checkpoints(run)] == [5]
    assert run.latest.read_text() == "step_000005\n"
    again = save_together(run, parts(whole(learner, 7), 2), ORIGIN, SharedSave(3, 20.0))
    assert all(isinstance(one, Checkpoint) for one in again)
    assert left_in(run) == ["latest", "step_000005", "step_000007"]


def test_a_rank_that_gives_up_takes_nothing_from_a_checkpoint_that_is_being_named(
    run, learner, monkeypatch
):
    def slow(*inputs):
        time.sleep(1.0)  # as an fsync on a busy disk
        return commit(*inputs)

    commit = content.commit
    monkeypatch.setattr("nsa_core.train.sharded_save.commit", slow)
    first, second = save_together(run, parts(whole(learner), 2), ORIGIN, SharedSave(1, 0.3))
    assert isinstance(first, Checkpoint)
    assert isinstance(second, content.CheckpointWriteError)
    assert not inspect_checkpoint(first.path).damage
    assert not list(first.path.glob("failed_*"))


def test_a_full_disk_of_one_rank_reaches_all_with_its_reason(run, learner, monkeypatch):
    def full(folder, snapshot):
        if snapshot.rank == 1:
            raise OSError(28, "No space left on device", str(folder))
        return write_tensors(folder, snapshot)

    write_tensors = content.write_tensors
    monkeypatch.setattr("nsa_core.train.sharded_save.write_tensors", full)
    first, second = save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    assert first.is_disk_full
    assert second.is_disk_full
    assert "rank 1 gave up its part" in str(first)
    assert "No space left" in str(first)
    assert list_checkpoints(run) == []
    (folder,) = run.checkpoints.iterdir()
    assert {path.name for path in folder.iterdir()} <= {"failed_rank0.json", "failed_rank1.json"}


def test_nobody_waits_for_a_process_that_is_gone(run, learner):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        gone = identify(process.pid)
    record = RankProcess(
        run_id="r1", attempt=1, rank=1, local_rank=1, num_ranks=2, process=gone, started_unix_s=0.0
    )
    write_rank_process(run, record)
    (failed,) = save_together(run, parts(whole(learner), 2)[:1], ORIGIN, SAVE)
    assert "the process of rank 1 is gone" in str(failed)


def killed_at(run, snapshots, place):
    """Save in a process that a kill -9 ends before its n-th fsync or rename; how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    countdown, lock = iter(range(place, 0, -1)), threading.Lock()
    fsync, rename = os.fsync, os.rename

    def counted(call):
        def stop_or(*inputs):
            with lock:
                if next(countdown, 0) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*inputs)

        return stop_or

    os.fsync, os.rename, os.replace = counted(fsync), counted(rename), counted(os.replace)
    saved = save_together(run, snapshots, ORIGIN, SharedSave(place + 1, 20.0))
    os._exit(0 if all(isinstance(one, Checkpoint) for one in saved) else 1)


def test_a_kill_at_any_instant_of_a_save_leaves_the_newest_whole_checkpoint(run, manifest, learner):
    save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    later, found = parts(whole(learner, 7), 2), []
    for place in range(1, 100):
        code = killed_at(run, later, place)
        point = find_resume_point(run, manifest, lambda folder, damage: pytest.fail(damage))
        found.append(point.state.step)
        if found[-1] == 7:
            shutil.rmtree(run.checkpoint(7))
        content.remove_leftovers(run)  # of a checkpoint; write_text may leave its own of `latest`
        assert {"latest", "step_000005"} == {name for name in left_in(run) if name[0] != "."}
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert len(found) > 20, "not many places to be killed at"
    assert found.index(7) > 15, "a checkpoint was there before all of its files"
    assert set(found[found.index(7) :]) == {7}


def test_one_flipped_bit_in_any_shard_is_noticed(run, manifest, learner):
    save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    for path in sorted(run.checkpoint(5).glob("*_rank1.*")):
        kept = path.read_bytes()
        path.write_bytes(kept[:-2] + bytes([kept[-2] ^ 1]) + kept[-1:])
        assert path.name in inspect_checkpoint(run.checkpoint(5)).damage
        path.write_bytes(kept)
    assert not inspect_checkpoint(run.checkpoint(5)).damage


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_shards": 3}, "does not list shard_rank2.json"),
        ({"num_shards": 10**30}, "shards and lists 12 files"),
        ({"num_shards": -1}, "shards and lists 12 files"),
    ],
)
def test_a_manifest_that_claims_other_shards_is_refused(run, learner, changes, words):
    save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    path = run.checkpoint(5) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert words in inspect_checkpoint(run.checkpoint(5)).damage


def shard(rank, *, rows=(0, 4), num_ranks=2, shape=(8, 3)):
    begin, end = rows
    model = {"w": TensorRows(begin=begin, end=end, shape=shape)}
    return CheckpointShard(
        rank=rank, num_ranks=num_ranks, step=1, attempt=1, model=model, optimizer={}, files=[]
    )


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (shard(1, rows=(4, 8)), None),
        (shard(1, rows=(5, 8)), "rows 4 to 5 of tensor `w` are missing"),
        (shard(1, rows=(3, 8)), "rows 3 to 4 of tensor `w` are there twice"),
        (shard(1, rows=(4, 7)), "rows 7 to 8 of tensor `w` are missing"),
        (shard(1, rows=(4, 9), shape=(9, 3)), "shapes"),
        (shard(0, rows=(4, 8)), "and not of rank 1 of 2"),
        (shard(1, rows=(4, 8), num_ranks=3), "and not of rank 1 of 2"),
    ],
)
def test_rows_have_to_be_there_exactly_once(second, fault):
    found = find_shard_fault([shard(0), second])
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize("rows", [(0, 9), (5, 4), (-1, 4)])
def test_rows_outside_of_their_tensor_are_refused(rows):
    with pytest.raises(ValueError, match=r"rows|greater"):
        shard(0, rows=rows)


def test_a_shape_that_no_file_could_hold_takes_no_memory(run, learner):
    checkpoint = save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)[0]
    stored = find_stored(checkpoint.path, checkpoint.manifest, MODEL_FILE)
    one = stored["norm.weight"]
    huge = replace(one, shape=(2**50,))
    with pytest.raises(ValueError, match="its files have"):
        read_stored({"norm.weight": huge})


def test_rows_of_another_type_in_one_of_the_files_are_refused(run, learner):
    snapshots = parts(whole(learner), 2)
    snapshots[1].model["norm.weight"] = snapshots[1].model["norm.weight"].half()
    checkpoint = save_together(run, snapshots, ORIGIN, SAVE)[0]
    stored = find_stored(checkpoint.path, checkpoint.manifest, MODEL_FILE)
    with pytest.raises(ValueError, match=r"norm.weight` is torch.float32 in one file and torch"):
        read_stored(stored)


def test_a_description_of_another_step_is_refused(run, learner):
    checkpoint = save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)[0]
    path = checkpoint.path / "shard_rank1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 4}))
    with pytest.raises(ValueError, match=r"shard_rank1\.json is of step 4"):
        find_stored(checkpoint.path, checkpoint.manifest, MODEL_FILE)


def test_a_part_is_written_though_the_checkpoint_is_named_before_its_rank_goes_on(
    run, learner, monkeypatch
):
    """Rank 0 renames the folder as soon as it sees the last part."""
    ranks, sync, write_tensors = {}, atomic.fsync_dir, sharded_save.write_tensors

    def note_rank(folder, taken):
        ranks[threading.get_ident()] = taken.rank
        return write_tensors(folder, taken)

    def sync_late(folder):
        end = time.monotonic() + 5
        if ranks.get(threading.get_ident()) == 1 and (folder / "shard_rank1.json").exists():
            while folder.exists() and time.monotonic() < end:
                time.sleep(0.01)
        sync(folder)

    monkeypatch.setattr(sharded_save, "write_tensors", note_rank)
    monkeypatch.setattr(atomic, "fsync_dir", sync_late)
    saved = save_together(run, parts(whole(learner), 2), ORIGIN, SAVE)
    assert all(isinstance(one, Checkpoint) for one in saved), saved
