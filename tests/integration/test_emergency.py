"""The laptop's disk is full, or its state folder is read-only: the run can be seen and halted."""

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nsa_ops.remote.audit import first_broken_line
from nsa_ops.store import Store
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import SshServer
from tests.integration.tcp_proxy import Proxy
from tests.integration.warm import Said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@dataclass(frozen=True, kw_only=True)
class Laptop(SshPod):
    """An operator without a runtime folder, whose state is on a disk of its own."""

    temporary: Path

    @property
    def environment(self) -> dict[str, str]:
        ours = {**super().environment, "TMPDIR": str(self.temporary)}
        del ours["XDG_RUNTIME_DIR"]
        return ours

    @property
    def disk(self) -> Path:
        return self.folder / self.state

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.disk)], check=True)

    def fill(self) -> None:
        """Leave not one block and not one name free."""
        filler = os.open(self.disk / "filler", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (self.disk / f"name{number}").touch()
        with contextlib.suppress(OSError):
            while True:
                os.write(filler, b"\0" * 512)
        os.close(filler)


@pytest.fixture
def laptop(server: SshServer, proxy: Proxy, tmp_path: Path, short_path: Path) -> Iterator[Laptop]:
    disk = tmp_path / "state"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=400", "tmpfs", str(disk)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this machine refuses a tmpfs mount: {refused.stderr.strip()}")
    one = Laptop(tmp_path, server=server, proxy=proxy, temporary=short_path)
    one.add()
    assert one.launch("r1", "schedule.steps=4000").exit_code == 0
    yield one
    subprocess.run(["mount", "-o", "remount,rw,size=32m,nr_inodes=0", str(disk)], check=True)
    one.stop()
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def check_emergency(laptop: Laptop, why: str) -> None:
    """Everything that is needed in an emergency works, and says what is not recorded."""
    for words in (
        ("status", "r1"), ("logs", "r1", "--offset", "-20"), ("events", "r1"), ("health", "r1"),
        ("stack", "r1"), ("watch", "r1", "--once"), ("run", "ls"),
    ):  # fmt: skip
        said = laptop(*words)
        assert said.exit_code == 0, (words, said)
        check_told(said, why)
    refused = laptop("backup", "pull", "r1", "-y")
    assert refused.exit_code == 11
    assert (
        "`halt` and `pod ssh` work meanwhile" in refused.err or "cannot be written" in refused.err
    )
    assert "NSA_OPS_STATE_DIR" not in refused.err
    assert laptop.must("pod", "ls", "--json").data[0]["name"] == "here"
    halted = laptop("halt", "r1", "-y", "-q", "--json")
    assert halted.exit_code == 0, halted
    assert halted.data["checkpoint"] is not None
    check_told(halted, why)
    assert b"r1 is halted" in laptop.must("status", "r1").out
    entered = laptop("pod", "ssh", "here")
    assert "Pseudo-terminal will not be allocated" in entered.err or entered.exit_code == 0, entered


def check_told(said: Said, why: str) -> None:
    told = [line for line in said.err.splitlines() if line.startswith("warning: not recorded: ")]
    assert any(why in line for line in told), said.err
    assert len(told) <= 3
    assert len(told) == len(set(told))


def test_a_read_only_state_folder_is_enough_to_see_and_halt_a_run(laptop: Laptop) -> None:
    before = {path: path.read_bytes() for path in laptop.disk.rglob("*") if path.is_file()}
    laptop.make_read_only()
    check_emergency(laptop, "Read-only file system")
    assert {path: path.read_bytes() for path in before} == before


def test_a_full_disk_is_enough_to_see_and_halt_a_run(laptop: Laptop) -> None:
    laptop.fill()
    check_emergency(laptop, "")
    subprocess.run(["mount", "-o", "remount,size=32m,nr_inodes=0", str(laptop.disk)], check=True)
    (laptop.disk / "filler").unlink()
    assert first_broken_line(laptop.disk / "audit.jsonl") is None
    after = laptop("status", "r1")
    assert (after.exit_code, "not recorded" in after.err) == (0, False)
    assert laptop("audit").exit_code == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from nsa_ops.store import PodRecord, Store
store = Store(Path(sys.argv[1]))
store.add_pod(PodRecord("late", "pod-2", "local", "/p", "python3", "", 0.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("has_shm", [True, False])
def test_what_stands_in_the_journal_of_a_killed_command_is_seen_on_a_read_only_disk(
    laptop: Laptop, *, has_shm: bool
) -> None:
    registry = laptop.disk / "registry.sqlite"
    words = [sys.executable, "-c", textwrap.dedent(KILLED), str(registry)]
    killed = subprocess.run(words, cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert registry.with_name("registry.sqlite-wal").stat().st_size > 0
    if not has_shm:
        registry.with_name("registry.sqlite-shm").unlink()
    laptop.make_read_only()
    said = laptop.must("pod", "ls", "--json")
    assert {pod["name"] for pod in said.data} == {"here", "late"}
    left = [path.name for path in Path("/dev/shm").glob("nsa-ops-*")]
    assert left + [path.name for path in laptop.temporary.glob("nsa-ops-*/registry*")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user here")
def test_a_registry_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    """As a user to whom rights mean something: root may write everything."""
    folder = Path("/tmp") / f"nsa-emergency-{os.getpid()}"  # where that user can come
    shutil.rmtree(folder, ignore_errors=True)
    store = Store(folder / "registry.sqlite")
    store.close()
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
        path.chmod(0o500 if path.is_dir() else 0o400)
    code = """
        import os, sys
        from pathlib import Path
        from nsa_ops.store import Store
        os.setgid(65534); os.setuid(65534)
        told = []
        store = Store(Path(sys.argv[1]), unrecorded=told.append)
        with store.intent("halt", "r1") as number: assert number == 0
        store.save_provision("p", 1.0, "x")
        assert store.pods() == [] and told, told
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(folder / "registry.sqlite")],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr


def test_a_registry_of_an_earlier_schema_is_read_where_it_cannot_be_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "old" / "registry.sqlite"
    path.parent.mkdir()
    with sqlite3.connect(path) as old:
        old.execute(
            "CREATE TABLE pods (name TEXT PRIMARY KEY, pod_id TEXT NOT NULL, kind TEXT NOT NULL, "
            "root TEXT NOT NULL, python TEXT NOT NULL, profile TEXT NOT NULL, "
            "added_unix_s REAL NOT NULL)"
        )
        old.execute("INSERT INTO pods VALUES ('here', 'pod-1', 'local', '/p', '/py', 'cpu', 1.0)")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path.parent)]
    kept = path.read_bytes()
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this machine refuses a tmpfs mount: {refused.stderr.strip()}")
    try:
        path.write_bytes(kept)
        subprocess.run(["mount", "-o", "remount,ro", str(path.parent)], check=True)
        told: list[str] = []
        store = Store(path, unrecorded=told.append, scratch_dirs=(tmp_path,))
        assert [pod.name for pod in store.pods()] == ["here"]
        assert len(told) == 1
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", str(path.parent)], check=True)
