"""A backup whose record, manifests or links lead elsewhere: nothing follows them."""

import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from nsa_core.rundir.checkpoint import MANIFEST_NAME, hash_file
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.push import Destination, execute_push, plan_push
from nsa_ops.backup.receipts import is_held
from nsa_ops.backup.restore import plan_restore, restore_here, restore_to_pod
from nsa_ops.backup.verification import verify_backup
from nsa_ops.errors import NotFoundError, OpsError, VerificationError
from nsa_ops.remote.local import LocalTransport
from tests.ops.backup.case import ENVIRONMENT, RUN_ID, Case

SECRET = "a private key"


@pytest.fixture
def pulled(tmp_path: Path) -> Case:
    case = Case(tmp_path / "a" / "b")
    case.build(20, 40)
    link = case.link()
    execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, "all"))
    (case.root / "secret").write_text(SECRET)
    return case


def entry(case: Case, name: str) -> dict[str, Any]:
    secret = case.root / "secret"
    return {"name": name, "size": secret.stat().st_size, "sha256": hash_file(secret)}


def add_to_record(case: Case, name: str) -> None:
    record = json.loads(case.backup.record.read_bytes())
    record["files"].append(entry(case, name))
    case.backup.record.write_text(json.dumps(record))


def change_record(**changes: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        record = json.loads(case.backup.record.read_bytes())
        case.backup.record.write_text(json.dumps(record | changes))

    return change


def name_in_record(name: str) -> Callable[[Case], None]:
    return lambda case: add_to_record(case, name.replace("SECRET", str(case.root / "secret")))


def link_file(name: str) -> Callable[[Case], None]:
    def link(case: Case) -> None:
        path = case.backup.root / name
        path.unlink()
        path.symlink_to(case.root / "secret")

    return link


def link_folder(name: str) -> Callable[[Case], None]:
    def link(case: Case) -> None:
        path = case.backup.root / name
        moved = case.root / "moved"
        path.rename(moved)
        path.symlink_to(moved)

    return link


def name_in_manifest(case: Case) -> None:
    path = case.backup.run.checkpoint(40) / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    manifest["files"].append(entry(case, "../../../../secret"))
    path.write_text(json.dumps(manifest))


def claim_step(case: Case) -> None:
    path = case.backup.run.checkpoint(20) / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    path.write_text(json.dumps(manifest | {"step": 999_999}))


def claim_run(case: Case) -> None:
    path = case.backup.run.checkpoint(40) / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    path.write_text(json.dumps(manifest | {"run_id": "another"}))


def nest_record(case: Case) -> None:
    case.backup.record.write_text("[" * 200_000)


def fifo(case: Case) -> None:
    case.backup.run.training_csv.unlink()
    os.mkfifo(case.backup.run.training_csv)


HARMS: dict[str, Callable[[Case], None]] = {
    "absolute": name_in_record("SECRET"),
    "above": name_in_record("../../secret"),
    "above later": name_in_record("attempts/../../../secret"),
    "own record": name_in_record("backup.json"),
    "in a checkpoint": name_in_record("checkpoints/step_000040/model.safetensors"),
    "NUL": name_in_record("a\0b"),
    "300 characters": name_in_record("x" * 300),
    "run above": change_record(run_id="../../evil"),
    "run absolute": change_record(run_id="/tmp/evil"),
    "run with ESC": change_record(run_id="\x1b[2J"),
    "nested record": nest_record,
    "linked record": link_file("backup.json"),
    "linked file": link_file("training.csv"),
    "linked tensor": link_file("checkpoints/step_000040/model.safetensors"),
    "linked manifest": link_file(f"checkpoints/step_000040/{MANIFEST_NAME}"),
    "linked checkpoint": link_folder("checkpoints/step_000040"),
    "linked checkpoints": link_folder("checkpoints"),
    "manifest above": name_in_manifest,
    "manifest of another step": claim_step,
    "manifest of another run": claim_run,
    "FIFO": fifo,
}


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_nothing_reads_or_writes_outside_a_backup(
    pulled: Case, harm: Callable[[Case], None], tmp_path: Path
) -> None:
    harm(pulled)
    before = tree(pulled.root)
    found = verify_backup(pulled.backup.root, load=True)
    assert found.differences != []
    there = tmp_path / "there"
    for act in (
        lambda: restore_here(plan_restore(pulled.backup, PurePosixPath(there))),
        lambda: restore_to_pod(
            pulled.link(),
            plan_restore(pulled.backup, PurePosixPath(there), link=pulled.link()),
            pulled.told.append,
        ),
        lambda: execute_push(
            pulled.operator,
            plan_push(
                pulled.operator,
                pulled.backup,
                Destination(LocalTransport(ENVIRONMENT), PurePosixPath(there), "there"),
            ),
        ),
    ):
        with pytest.raises(OpsError) as caught:
            act()
        assert caught.value.exit_code in {6, 9}
    assert not there.exists()
    now = tree(pulled.root)
    assert {name: now[name] for name in before} == before


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_pull_into_a_harmed_backup_touches_nothing_outside(
    pulled: Case, harm: Callable[[Case], None]
) -> None:
    harm(pulled)
    moved = tree(pulled.root / "moved") if (pulled.root / "moved").exists() else {}
    link = pulled.link()
    try:
        execute_pull(pulled.operator, link, plan_pull(link, RUN_ID, pulled.backup, "all"))
    except OpsError as error:
        assert error.exit_code in {9, 10, 11}
    assert (pulled.root / "secret").read_text() == SECRET
    assert tree(pulled.root / "moved") == moved or not moved
    assert not (pulled.root.parent / "evil").exists()


def test_strangers_in_a_checkpoint_are_never_sent(pulled: Case, tmp_path: Path) -> None:
    (pulled.backup.run.checkpoint(40) / "stranger").symlink_to(pulled.root / "secret")
    (pulled.backup.root / "stranger").symlink_to(pulled.root / "secret")
    far = Destination(LocalTransport(ENVIRONMENT), PurePosixPath(tmp_path / "far"), "far")
    execute_push(pulled.operator, plan_push(pulled.operator, pulled.backup, far))
    planned = plan_restore(pulled.backup, PurePosixPath(tmp_path / "near"), link=pulled.link())
    restore_to_pod(pulled.link(), planned, pulled.told.append)
    for name in ("far", "near"):
        copied = tree(tmp_path / name)
        assert len(copied) > 8
        assert SECRET.encode() not in copied.values()


def test_a_copy_without_a_record_is_restored_without_its_links(
    pulled: Case, tmp_path: Path
) -> None:
    pulled.backup.record.unlink()
    (pulled.backup.root / "link").symlink_to(pulled.root / "secret")
    (pulled.backup.root / "folder").symlink_to(pulled.root)
    planned = plan_restore(pulled.backup, PurePosixPath(tmp_path / "near"))
    assert "left out: `link` is a link" in planned.plan.notes
    restore_here(planned)
    assert SECRET.encode() not in tree(tmp_path / "near").values()


def test_a_folder_whose_name_is_no_run_id_is_not_restored(pulled: Case, tmp_path: Path) -> None:
    pulled.backup.record.unlink()
    odd = pulled.backup.root.with_name("odd name")
    pulled.backup.root.rename(odd)
    with pytest.raises(VerificationError, match="no run id"):
        plan_restore(BackupFolder(odd), PurePosixPath(tmp_path / "near"))


def test_a_link_to_a_checkpoint_is_no_held_receipt(pulled: Case) -> None:
    receipts = pulled.operator.store.receipts(RUN_ID)
    assert all(map(is_held, receipts))
    link_file("checkpoints/step_000040/model.safetensors")(pulled)
    link_folder("checkpoints/step_000020")(pulled)
    assert not any(map(is_held, receipts))


def test_nested_json_of_a_checkpoint_is_a_difference(pulled: Case) -> None:
    folder = pulled.backup.run.checkpoint(40)
    deep = folder / "state.json"
    deep.write_text("[" * 100_000)
    manifest = json.loads((folder / MANIFEST_NAME).read_bytes())
    for file in manifest["files"]:
        if file["name"] == "state.json":
            file |= {"size": deep.stat().st_size, "sha256": hash_file(deep)}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    (difference,) = verify_backup(pulled.backup.root, load=True).differences
    assert "nested" in difference.sentence


def test_a_folder_without_anything_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no backup"):
        verify_backup(tmp_path)
