"""Verify: every byte is hashed, every tensor accounted for, every difference named."""

from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import MANIFEST_NAME
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.verification import check_verified, renew_receipts, verify_backup
from nsa_ops.errors import NotFoundError, VerificationError
from tests.ops.backup.case import RUN_ID, Case, flip_bit


@pytest.fixture
def pulled(tmp_path: Path) -> Case:
    case = Case(tmp_path)
    case.build(20, 40)
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "all"))
    return case


def test_a_good_backup_has_no_difference(pulled: Case) -> None:
    found = verify_backup(pulled.backup.root, load=True, receipts=pulled.operator.store.receipts())
    assert found.differences == []
    assert found.steps == [40, 20]
    assert found.num_tensors == 4
    check_verified(found)


@pytest.mark.parametrize(
    "name",
    [
        "training.csv",
        "checkpoints/step_000020/model.safetensors",
        "checkpoints/step_000040/state.json",
    ],
)
def test_a_flipped_bit_is_named_with_both_hashes(pulled: Case, name: str) -> None:
    flip_bit(pulled.backup.root / name)
    found = verify_backup(pulled.backup.root)
    (difference,) = found.differences
    assert difference.path == pulled.backup.root / name
    with pytest.raises(VerificationError) as caught:
        check_verified(found)
    assert caught.value.exit_code == 9
    assert Path(name).name in caught.value.message
    assert caught.value.message.count("sha256") == 2


def test_a_missing_and_a_shortened_file_are_named(pulled: Case) -> None:
    folder = pulled.backup.run.checkpoint(40)
    (folder / "state.json").unlink()
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    sentences = [one.sentence for one in verify_backup(pulled.backup.root).differences]
    assert any("state.json" in line and line.endswith("is missing") for line in sentences)
    size = model.stat().st_size
    assert any(f"{size + 1} bytes and is {size} bytes" in line for line in sentences)


def test_a_manifest_that_was_changed_with_its_files_is_caught_by_the_receipt(pulled: Case) -> None:
    manifest = pulled.backup.run.checkpoint(40) / MANIFEST_NAME
    manifest.write_text(manifest.read_text() + "\n")
    assert verify_backup(pulled.backup.root).differences == []
    receipts = pulled.operator.store.receipts()
    (difference,) = verify_backup(pulled.backup.root, receipts=receipts).differences
    assert "as its receipt says" in difference.expected


def test_a_checkpoint_without_its_manifest_is_a_difference(pulled: Case) -> None:
    (pulled.backup.run.checkpoint(20) / MANIFEST_NAME).unlink()
    found = verify_backup(pulled.backup.root)
    assert found.steps == [40]
    assert found.differences[0].found == "missing"


def test_a_run_directory_that_was_never_pulled_can_be_verified(pulled: Case) -> None:
    assert verify_backup(pulled.run.root, load=True).steps == [40, 20]


def test_verifying_renews_the_receipts_of_what_is_whole(pulled: Case) -> None:
    flip_bit(pulled.backup.run.checkpoint(20) / "model.safetensors")
    store = pulled.operator.store
    renew_receipts(store, verify_backup(pulled.backup.root), 2e9)
    renewed = {one.step: one.verified_unix_s == 2e9 for one in store.receipts()}
    assert renewed == {40: True, 20: False}


def test_a_folder_without_a_backup_is_not_verified(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no backup"):
        verify_backup(tmp_path)
