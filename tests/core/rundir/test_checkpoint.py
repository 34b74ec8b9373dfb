import pytest

from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    hash_file,
    inspect_checkpoint,
    list_checkpoints,
    read_checkpoint,
)
from nsa_core.rundir.layout import RunDir


def save(run, step):
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(range(256)) * step)
    manifest = CheckpointManifest(
        run_id="run-a",
        attempt=1,
        step=step,
        tokens_seen=step * 10,
        created_unix_s=1.0,
        config_sha256="0" * 64,
        files=[
            CheckpointFile(
                name=weights.name, size=weights.stat().st_size, sha256=hash_file(weights)
            )
        ],
    )
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return weights


def test_checkpoints_are_listed_newest_first_by_number_and_folders_without_manifest_are_not(
    tmp_path,
):
    run = RunDir(tmp_path)
    for step in (2, 10, 9):
        save(run, step)
    run.checkpoint(11).mkdir()
    (run.checkpoints / "step_000012.tmp").mkdir()
    run.latest.write_text("step_000010")
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [10, 9, 2]


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert list_checkpoints(RunDir(tmp_path)) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_each_kind_of_damage_is_found_and_named(tmp_path, damage):
    run = RunDir(tmp_path)
    weights = save(run, 3)
    checkpoint = read_checkpoint(run.checkpoint(3))
    assert checkpoint is not None
    assert not inspect_checkpoint(checkpoint.path).damage
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[100] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:-1])
    else:
        weights.unlink()
    found = inspect_checkpoint(checkpoint.path).damage
    assert found is not None
    assert "model.safetensors" in found
