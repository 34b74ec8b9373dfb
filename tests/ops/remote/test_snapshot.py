import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from nsa_ops.errors import LocalResourceError, VerificationError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.snapshot import code_root, has_code, ship, take_snapshot
from tests.ops.fakes import FakeTransport, completed


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "nsa_core" / "__pycache__").mkdir(parents=True)
    (root / "nsa_core" / "a.py").write_text("a = 1\n")
    (root / "nsa_core" / "__pycache__" / "a.pyc").write_bytes(b"x")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "notes.txt").write_text("not code\n")
    return root


@pytest.fixture
def local() -> LocalTransport:
    return LocalTransport({"PATH": os.environ["PATH"]})


def test_a_snapshot_is_the_code_and_nothing_else(checkout: Path) -> None:
    snapshot = take_snapshot(checkout)
    assert snapshot.files == ("nsa_core/a.py", "pyproject.toml")
    assert (snapshot.commit, snapshot.dirty_sha256) == ("unknown", "")


def test_the_id_changes_with_content_and_with_names(checkout: Path) -> None:
    first = take_snapshot(checkout).code_id
    (checkout / "nsa_core" / "a.py").write_text("a = 2\n")
    second = take_snapshot(checkout).code_id
    (checkout / "nsa_core" / "a.py").rename(checkout / "nsa_core" / "b.py")
    assert len({first, second, take_snapshot(checkout).code_id}) == 3


def test_uncommitted_changes_are_seen(checkout: Path) -> None:
    git = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    clean = take_snapshot(checkout)
    assert len(clean.commit) == 40
    assert clean.dirty_sha256 == ""
    (checkout / "nsa_core" / "a.py").write_text("a = 2\n")
    assert take_snapshot(checkout).dirty_sha256 != ""


def test_code_arrives_whole_and_a_second_time_moves_nothing(
    checkout: Path, local: LocalTransport, tmp_path: Path
) -> None:
    snapshot = take_snapshot(checkout)
    target = PurePosixPath(tmp_path / "pod" / "code" / snapshot.code_id)
    assert ship(snapshot, local, sys.executable, target)
    assert not ship(snapshot, local, sys.executable, target)
    assert take_snapshot(Path(target)).code_id == snapshot.code_id
    assert [path.name for path in Path(target).parent.iterdir()] == [snapshot.code_id]


def test_code_that_changed_on_the_way_is_refused(
    checkout: Path, local: LocalTransport, tmp_path: Path
) -> None:
    snapshot = take_snapshot(checkout)
    (checkout / "nsa_core" / "a.py").write_text("a = 666\n")
    target = PurePosixPath(tmp_path / "pod" / "code" / snapshot.code_id)
    with pytest.raises(VerificationError, match="arrived with hash"):
        ship(snapshot, local, sys.executable, target)
    assert not has_code(local, sys.executable, target)
    assert list(Path(target).parent.iterdir()) == []


def test_a_full_disk_is_named(checkout: Path) -> None:
    full = FakeTransport(
        {
            "sys.exit(not": completed(exit_code=1),
            "tarfile": completed(exit_code=1, stderr="OSError: [Errno 28] No space left on device"),
        }
    )
    with pytest.raises(LocalResourceError, match="No space left on device"):
        ship(take_snapshot(checkout), full, "python3", PurePosixPath("/pod/code/x"))


def test_this_project_ships_both_packages_and_its_profiles() -> None:
    files = set(take_snapshot(code_root()).files)
    assert {"nsa_core/config/run.py", "nsa_ops/pod/act.py", "profiles/cpu.yaml"} <= files
