"""Where a backup goes, and where it must not."""

from pathlib import Path

import pytest

from nsa_ops.backup.backups import BACKUPS, backup_folder, find_backup
from nsa_ops.backup.folder import RECORD_NAME
from nsa_ops.errors import ConfigurationError
from tests.ops.backup.case import RUN_ID, Case


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_backup_goes_below_the_state_folder_or_where_it_is_told(
    case: Case, tmp_path: Path
) -> None:
    state = case.operator.settings.state_dir
    assert backup_folder(case.operator, RUN_ID).root == state / BACKUPS / RUN_ID
    named = state / BACKUPS
    assert backup_folder(case.operator, RUN_ID, named).root == named / RUN_ID
    elsewhere = tmp_path / "elsewhere"
    assert backup_folder(case.operator, RUN_ID, elsewhere).root == elsewhere / RUN_ID


@pytest.mark.parametrize("below", [".", "leases", "a/b", "backups/.."])
def test_a_destination_among_the_files_of_the_registry_is_refused(case: Case, below: str) -> None:
    state = case.operator.settings.state_dir
    state.mkdir(exist_ok=True)
    with pytest.raises(ConfigurationError, match="is in the state folder"):
        backup_folder(case.operator, RUN_ID, state / below)


def test_a_destination_inside_another_backup_is_refused_also_behind_a_link(
    case: Case, tmp_path: Path
) -> None:
    other = tmp_path / "kept" / "another-run"
    other.mkdir(parents=True)
    (other / RECORD_NAME).write_text("{}")
    (tmp_path / "link").symlink_to(other)
    for dest in (other, other / "checkpoints", tmp_path / "link"):
        with pytest.raises(ConfigurationError, match="is inside the backup"):
            backup_folder(case.operator, RUN_ID, dest)
    assert backup_folder(case.operator, RUN_ID, other.parent).root == other.parent / RUN_ID


def test_a_dot_means_this_folder(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case.operator.settings.state_dir.parent)
    assert find_backup(case.operator, ".").root == Path.cwd()
