"""A backup that was pulled before names were checked (commit d1291d8) is still a good one."""

import tarfile
from pathlib import Path, PurePosixPath

import pytest

from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_ops.backup.folder import BackupFolder, read_record
from nsa_ops.backup.push import Destination, execute_push, plan_push
from nsa_ops.backup.restore import plan_restore, restore_here
from nsa_ops.backup.verification import verify_backup
from nsa_ops.remote.local import LocalTransport
from tests.ops.backup.case import ENVIRONMENT, RUN_ID, Case

ARCHIVE = Path(__file__).with_name("backup_before_rules.tar.gz")


@pytest.fixture
def older(tmp_path: Path) -> BackupFolder:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "backups", filter="data")
    return BackupFolder(tmp_path / "backups" / RUN_ID)


def test_it_is_verified_to_the_last_tensor(older: BackupFolder) -> None:
    found = verify_backup(older.root, load=True)
    assert (found.differences, found.steps, found.num_tensors) == ([], [40, 20], 4)
    read = read_record(older)
    assert read.record is not None
    assert (read.record.run_id, len(read.record.files), read.refused) == (RUN_ID, 8, [])


def test_it_is_restored_and_pushed(older: BackupFolder, tmp_path: Path) -> None:
    case = Case(tmp_path)
    restored = restore_here(plan_restore(older, PurePosixPath(tmp_path / "near")))
    assert restored.step == 40
    run = RunDir(Path(restored.target))
    assert read_manifest(run).attempt == 2
    assert read_exit(run) is None
    assert len(read_events(run)) > 1
    far = Destination(LocalTransport(ENVIRONMENT), PurePosixPath(tmp_path / "far"), "far")
    execute_push(case.operator, plan_push(case.operator, older, far))
    assert verify_backup(tmp_path / "far" / RUN_ID, load=True).differences == []
