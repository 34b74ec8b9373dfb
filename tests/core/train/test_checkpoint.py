import json
import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nsa_core.config.run import RunConfig
from nsa_core.model.weights import load_model_tensors, model_tensors
from nsa_core.rundir.checkpoint import (
    MODEL_FILE,
    inspect_checkpoint,
    list_checkpoints,
    read_checkpoint,
)
from nsa_core.train import checkpoint_files as content
from nsa_core.train.failure import CheckpointError
from nsa_core.train.random_state import read_random_state, restore_random_state
from nsa_core.train.resume import find_resume_point, set_aside_later
from nsa_core.train.run_files import write_final_model
from tests.core.train.models import CPU, make_model, same, weights

ORIGIN = content.CheckpointOrigin("r1", 1, "c0ffee", "tokens")


def snapshot(step, model=None, **state):
    return content.TrainingSnapshot(
        state=content.TrainingState(step=step, tokens_seen=step * 10, loader={}, **state),
        config=RunConfig(),
        model=content.to_host(model_tensors(model or make_model())),
        optimizer={},
        random={0: read_random_state(CPU)},
    )


def write(run, *steps):
    for step in steps:
        content.name_latest(run, content.write_checkpoint(run, snapshot(step), ORIGIN).path)


def test_a_written_checkpoint_is_whole_and_named_by_latest(run):
    write(run, 5, 10)
    assert [c.step for c in list_checkpoints(run)] == [10, 5]
    assert all(not inspect_checkpoint(c.path).damage for c in list_checkpoints(run))
    assert run.latest.read_text() == "step_000010\n"


def test_files_are_readable_by_others_whatever_the_umask(run):
    """A backup logs in as somebody else, and safetensors makes files for their owner alone."""
    before = os.umask(0o077)
    try:
        write(run, 5)
        write_final_model(run, make_model())
    finally:
        os.umask(before)
    files = [*run.checkpoint(5).iterdir(), run.latest, run.final_model]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: "0o644" for path in files
    }


def test_nothing_in_a_checkpoint_is_a_pickle(run):
    write(run, 5)
    for path in run.checkpoint(5).iterdir():
        head = path.read_bytes()[:2]
        assert head != b"PK"
        assert not head.startswith(b"\x80")
        assert path.suffix in {".json", ".safetensors"}


def test_weights_come_back_bit_for_bit(run):
    model, other = make_model(seed=3), make_model(seed=4)
    content.write_checkpoint(run, snapshot(1, model), ORIGIN)
    load_model_tensors(other, load_file(run.checkpoint(1) / MODEL_FILE))
    assert same(weights(model), weights(other))


def test_a_tied_head_is_stored_once():
    assert len(model_tensors(make_model())) == len(list(make_model().named_parameters()))


def test_a_snapshot_does_not_change_with_the_model():
    model = make_model()
    taken = snapshot(1, model)
    before = taken.model["norm.weight"].clone()
    with torch.no_grad():
        model.norm.weight.add_(1)
    assert torch.equal(taken.model["norm.weight"], before)


@pytest.mark.parametrize(("name", "change"), [("missing", None), ("shape", torch.zeros(3))])
def test_tensors_of_another_model_are_refused_by_name(name, change):
    tensors = {k: v.clone() for k, v in model_tensors(make_model()).items()}
    if change is None:
        del tensors["norm.weight"]
    else:
        tensors["norm.weight"] = change
    with pytest.raises(ValueError, match=r"norm\.weight"):
        load_model_tensors(make_model(), tensors)


def test_all_random_generators_come_back(run):
    content.write_checkpoint(run, snapshot(1), ORIGIN)
    expected = (random.random(), np.random.rand(), torch.rand(3))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    folder = run.checkpoint(1)
    (state,) = content.read_random(folder, read_checkpoint(folder).manifest)
    restore_random_state(state, CPU)
    found = (random.random(), np.random.rand(), torch.rand(3))
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])


def test_a_leftover_of_a_kill_is_removed_and_named(run):
    write(run, 5)
    leftover = run.checkpoints / f"{content.TEMPORARY_PREFIX}step_000010"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    for name in (".latest.9d2m5ylr", ".known_good.ab_12cd3"):
        (run.checkpoints / name).write_text("step_0")
    removed = [".known_good.ab_12cd3", ".latest.9d2m5ylr", leftover.name]
    assert content.remove_leftovers(run) == [(name, "") for name in removed]
    kept = {path.name for path in run.checkpoints.iterdir()}
    assert kept == {"latest", run.checkpoint(5).name}
    assert read_checkpoint(run.checkpoint(5)) is not None


class Rejections(list):
    def __call__(self, folder, damage):
        self.append((folder.name, damage))


def find(run, manifest):
    rejected = Rejections()
    return find_resume_point(run, manifest, rejected), rejected


def test_without_any_checkpoint_there_is_a_fresh_start(run, manifest):
    assert find(run, manifest) == (None, [])


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"]


@pytest.mark.parametrize("name", [*FILES, "random_rank0.json", "random_rank0.safetensors"])
def test_one_flipped_bit_in_any_file_is_noticed(run, manifest, name):
    write(run, 5, 10)
    path = run.checkpoint(10) / name
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    point, rejected = find(run, manifest)
    assert point.state.step == 5
    assert rejected[0][0] == "step_000010"
    assert name in rejected[0][1]


def test_a_changed_step_in_the_manifest_is_noticed(run, manifest):
    write(run, 5)
    path = run.checkpoint(5) / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 5', '"step": 7'))
    with pytest.raises(CheckpointError, match="damaged"):
        find(run, manifest)


def test_a_manifest_that_lists_too_little_is_damage(run, manifest):
    write(run, 5, 10)
    path = run.checkpoint(10) / "checkpoint.json"
    listed = json.loads(path.read_text())
    listed["files"] = [f for f in listed["files"] if f["name"] != "optimizer.safetensors"]
    path.write_text(json.dumps(listed))
    point, rejected = find(run, manifest)
    assert point.state.step == 5
    assert "optimizer.safetensors" in rejected[0][1]


def test_shards_that_a_manifest_only_claims_are_not_counted_to(run, manifest):
    write(run, 5, 10)
    path = run.checkpoint(10) / "checkpoint.json"
    claimed = json.loads(path.read_text()) | {"num_shards": 100_000}  # 2**70 fill the memory
    path.write_text(json.dumps(claimed))
    point, rejected = find(run, manifest)
    assert point.state.step == 5
    assert "claims 100000 shards and lists" in rejected[0][1]


def test_a_missing_latest_changes_nothing(run, manifest):
    write(run, 5)
    run.latest.unlink()
    assert find(run, manifest)[0].state.step == 5


def test_only_damaged_ones_are_an_error_and_never_a_fresh_start(run, manifest):
    write(run, 5, 10)
    for step in (5, 10):
        (run.checkpoint(step) / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        find(run, manifest)


def test_setting_aside_keeps_the_content_and_frees_the_name(run):
    write(run, 5, 10)
    assert set_aside_later(run, 5, 2) == ["aside_attempt2_step_000010"]
    write(run, 10)
    assert set_aside_later(run, 5, 2) == ["aside_attempt2_step_000010_again"]
    assert [c.step for c in list_checkpoints(run)] == [5]
