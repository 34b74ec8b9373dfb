"""What a checkpoint of the trainer holds, and a run that goes on from one, in this process."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train.checkpoint_files import read_state
from nsa_core.train.loop import train
from tests.core.train.models import same, weights
from tests.core.train.sessions import new_run, opened, run_here, saved
from tests.integration.trainer_runs import events, losses, next_attempt, rows

STEPS = 5


@pytest.fixture(scope="module", params=["adamw", "muon"])
def whole(request, text, tmp_path_factory):
    run = new_run(
        tmp_path_factory.mktemp(request.param), text, optimizer={"kind": request.param},
        evaluation={"eval_every": 3},
    )  # fmt: skip
    assert run_here(run).code == 0
    return run


@pytest.fixture
def cut(whole, tmp_path):
    """A copy of the whole run whose last checkpoint is that of step 2."""
    root = tmp_path / "runs" / whole.run_id
    shutil.copytree(whole.root, root)
    run = RunDir(root)
    for step in range(3, STEPS + 1):
        shutil.rmtree(run.checkpoint(step))
    next_attempt(run)
    return run


def test_a_checkpoint_holds_weights_moments_cursor_and_generators(whole):
    for step in (1, STEPS):
        state = read_state(whole.checkpoint(step))
        tokens = read_manifest(whole).config.batch.tokens_per_step
        assert (state.step, state.tokens_seen) == (step, step * tokens)
        assert state.loader["global_sample"] == step * 4
        assert state.unusable_steps == []
        assert state.loss_scaler is None
        assert 0 < state.step_seconds < 300
        model, optimizer = saved(whole, step)
        with_moments = {name.rpartition("/")[0] for name in optimizer}
        assert with_moments == model.keys()
        generators = load_file(whole.checkpoint(step) / "random_rank0.safetensors")
        assert generators.keys() == {"cpu"}


def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(whole, cut):
    assert run_here(cut).code == 0
    assert losses(cut) == losses(whole)
    for step in range(3, STEPS + 1):
        for found, expected in zip(saved(cut, step), saved(whole, step), strict=True):
            assert same(found, expected)
        found, expected = read_state(cut.checkpoint(step)), read_state(whole.checkpoint(step))
        assert found.loader == expected.loader
        assert found.tokens_seen == expected.tokens_seen
    assert [row["val_loss"] for row in rows(cut.validation_csv)] == [
        row["val_loss"] for row in rows(whole.validation_csv)
    ]
    assert same(load_file(cut.final_model), load_file(whole.final_model))


def test_a_resumed_run_continues_its_counts(whole, cut):
    with opened(cut) as session:
        assert session.step == 2
        assert session.keeper.begin_step == 2
        assert session.keeper.whole_step == 2
        assert session.loader.state.global_sample == 8
        assert session.position.tokens_seen == 2 * session.config.batch.tokens_per_step
        assert same(weights(session.model), saved(whole, 2)[0])
        state = session.steps.optimizers.state_tensors()
        assert same(state, saved(whole, 2)[1])


def test_seconds_of_steps_that_are_done_again_are_lost(cut):
    kept = read_state(cut.checkpoint(2)).step_seconds
    before = json.loads(cut.goodput.read_text())["buckets"]
    with opened(cut) as session:
        found = session.clock.read(attempt=2, step=2).buckets
    assert found["step"] == pytest.approx(kept, abs=2e-3)
    lost = before["step"] - kept
    assert lost > 0
    assert found["rollback_lost"] == pytest.approx(before["rollback_lost"] + lost, abs=5e-3)


def test_a_snapshot_is_of_the_last_boundary_and_not_of_the_samples_fetched_since(text, tmp_path):
    with opened(new_run(tmp_path, text, schedule={"steps": 2, "warmup_steps": 0})) as session:
        train(session)
        session.loader.next_batch()
        torch.rand(3)
        state = session.snapshot().state
        assert (state.step, state.loader["global_sample"]) == (2, 8)
        kept = load_file(session.context.run.checkpoint(2) / "random_rank0.safetensors")
        assert torch.equal(session.snapshot().random[0].tensors["cpu"], kept["cpu"])


def test_a_loss_scale_is_in_the_snapshot(text, tmp_path):
    with opened(new_run(tmp_path, text)) as session:
        session.steps.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
        session.steps.scaler.scale(torch.ones(1))
        assert session.snapshot().state.loss_scaler["scale"] == 32.0


def test_a_skipped_step_is_still_counted_after_a_stop(whole, cut):
    """Three in a hundred end a run, whatever stops lie between them."""
    state = whole.checkpoint(2) / "state.json"
    changed = json.loads(state.read_text()) | {"unusable_steps": [1, 2]}
    write_checkpoint_file(cut, 2, "state.json", json.dumps(changed))
    with opened(cut) as session:
        assert session.position.unusable_steps == (1, 2)
        assert session.keeper.last_anomaly_step == 2


def write_checkpoint_file(run, step, name, content):
    """Replace a file of a checkpoint together with its hash."""
    folder = run.checkpoint(step)
    (folder / name).write_text(content)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    for file in manifest["files"]:
        if file["name"] == name:
            file["size"] = len(content)
            file["sha256"] = hashlib.sha256(content.encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def test_a_save_that_was_asked_for_before_the_first_step_comes_after_it(text, tmp_path):
    run = new_run(tmp_path, text, checkpoint={"save_every": 0}, schedule={"steps": 2})
    with opened(run) as session:
        session.context.signals.save_asked = True
        assert train(session) is None
        session.keeper.drain()
    assert [event.facts["step"] for event in events(run, "saved")] == [1, 2]
