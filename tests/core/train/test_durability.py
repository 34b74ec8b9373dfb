"""What must be on the disk before what: a power cut may come between any two calls."""

import pytest

from nsa_core.model.weights import model_tensors
from nsa_core.rundir.checkpoint import MANIFEST_NAME, list_checkpoints
from nsa_core.train import checkpoint_files as content
from nsa_core.train.random_state import read_random_state
from nsa_core.train.run_files import write_final_model
from tests.core.train.disk_trace import DiskTrace
from tests.core.train.models import CPU, make_model

ORIGIN = content.CheckpointOrigin("r1", 1, "c0ffee", "tokens")
FILES = {
    "model.safetensors", "optimizer.safetensors", "random_rank0.safetensors",
    "random_rank0.json", "state.json", "config.json", MANIFEST_NAME,
}  # fmt: skip


@pytest.fixture
def trace(monkeypatch):
    return DiskTrace(monkeypatch)


def save(run, manifest, step):
    model = make_model(seed=step)
    snapshot = content.TrainingSnapshot(
        state=content.TrainingState(step=step, tokens_seen=step * 10, loader={}),
        config=manifest.config,
        model=content.to_host(model_tensors(model)),
        optimizer={},
        random={0: read_random_state(CPU)},
    )
    written = content.write_checkpoint(run, snapshot, ORIGIN)
    content.name_latest(run, written.path)
    return written


def test_a_save_makes_each_part_durable_before_the_next_names_it(run, manifest, trace):
    """All files and their folder, then the folder's name, then that name's folder, then latest."""
    assert save(run, manifest, 5) == list_checkpoints(run)[0]
    final = run.checkpoint(5)
    renamed_at, renamed = trace.rename_to(final)
    assert renamed.content.keys() == FILES
    assert set(renamed.content.values()) <= trace.synced_before(renamed_at)
    named_at, _ = trace.rename_to(renamed.source / MANIFEST_NAME)
    assert any(named_at < place < renamed_at for place in trace.syncs_of(renamed.source))
    latest_at, latest = trace.rename_to(run.latest)
    assert any(renamed_at < place < latest_at for place in trace.syncs_of(run.checkpoints))
    assert set(latest.content.values()) <= trace.synced_before(latest_at)
    assert trace.syncs_of(run.latest.parent)[-1] > latest_at


def test_the_final_model_is_durable_before_it_has_its_name(run, trace):
    write_final_model(run, make_model())
    renamed_at, renamed = trace.rename_to(run.final_model)
    assert set(renamed.content.values()) <= trace.synced_before(renamed_at)
    assert any(place > renamed_at for place in trace.syncs_of(run.root))
