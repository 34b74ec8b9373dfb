from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    hash_file,
    inspect_checkpoint,
    list_checkpoints,
    verify_checkpoint,
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


def flip(weights):
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)


def cut(weights):
    weights.write_bytes(weights.read_bytes()[:-1])


def link(weights):
    weights.symlink_to(weights.rename(weights.with_name("elsewhere")))


@pytest.mark.parametrize(
    ("harm", "has_right_size", "found"),
    [
        (flip, True, "sha256 "),
        (cut, False, "767 bytes"),
        (Path.unlink, False, "missing"),
    ],
)
def test_each_kind_of_damage_is_found_and_named(tmp_path, harm, has_right_size, found):
    weights = save(RunDir(tmp_path), 3)
    folder = weights.parent
    assert not inspect_checkpoint(folder).damage
    harm(weights)
    assert (not inspect_checkpoint(folder, with_hashes=False).damage) is has_right_size
    state = inspect_checkpoint(folder)
    assert state.damage.startswith("model.safetensors should be ")
    assert [flaw.path for flaw in state.flaws] == [weights]
    assert state.flaws[0].found.startswith(found)


def test_a_link_is_a_flaw_only_where_links_are_not_followed(tmp_path):
    weights = save(RunDir(tmp_path), 3)
    link(weights)
    assert not inspect_checkpoint(weights.parent).damage
    flaws = inspect_checkpoint(weights.parent, follow_links=False).flaws
    assert [flaw.found for flaw in flaws] == ["a link"]


def test_a_folder_with_the_name_of_another_step_is_not_whole(tmp_path):
    folder = save(RunDir(tmp_path), 3).parent
    renamed = folder.rename(RunDir(tmp_path).checkpoint(4))
    assert "should be of step 4 and is of step 3" in inspect_checkpoint(renamed).damage
    assert not inspect_checkpoint(renamed.rename(tmp_path / "conflict_step_000004")).damage


def test_nothing_is_hashed_where_a_file_is_too_short(tmp_path):
    weights = save(RunDir(tmp_path), 3)
    folder = weights.parent
    assert not verify_checkpoint(folder).damage
    flip(weights)
    assert "should be sha256 " in verify_checkpoint(folder).damage
    manifest = inspect_checkpoint(folder).manifest
    later = CheckpointFile(name="optimizer.safetensors", size=9, sha256="0" * 64)
    manifest = manifest.model_copy(update={"files": [*manifest.files, later]})
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    (folder / later.name).write_bytes(b"short")
    damage = verify_checkpoint(folder).damage
    assert damage == "optimizer.safetensors should be 9 bytes and is 5 bytes"


def test_what_an_agent_prints_has_neither_manifest_nor_flaws(tmp_path):
    printed = inspect_checkpoint(save(RunDir(tmp_path), 3).parent).model_dump()
    assert printed.keys() == {
        "path", "damage", "run_id", "attempt", "attempt_id", "step", "tokens_seen", "total_bytes",
        "created_unix_s",
    }  # fmt: skip
