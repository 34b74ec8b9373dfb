"""Faults of the operator's own machine: disk, registry, folders, and what it keeps secret."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_ops.remote.audit import first_broken_line
from nsa_ops.store import Store
from tests.integration.local_pod import CANARY
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import SshServer, openssh

pytestmark = pytest.mark.integration
LONG = "schedule.steps=4000"


@pytest.fixture
def pod(new_pod: SshPod) -> SshPod:
    return new_pod


class HomeIn(SshPod):
    """An operator whose home is another folder, with nothing that says where state is kept."""

    @property
    def environment(self) -> dict[str, str]:
        ours = {**super().environment, "HOME": str(self.folder / "home")}
        if self.state == "":
            del ours["NSA_OPS_STATE_DIR"], ours["XDG_RUNTIME_DIR"]
        return ours


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A home that nobody can write, root included."""
    home = tmp_path / "home"
    home.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(home)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this machine refuses a tmpfs mount: {refused.stderr.strip()}")
    yield home
    subprocess.run(["umount", "--lazy", str(home)], check=True)


def test_a_home_that_is_read_only_is_named_and_another_state_folder_is_enough(
    pod: SshPod, read_only: Path, tmp_path: Path
) -> None:
    operator = HomeIn(tmp_path, server=pod.server, proxy=pod.proxy, state="")
    refused = operator("pod", "ls")
    assert refused.exit_code == 11
    assert str(read_only) in refused.err
    assert "NSA_OPS_STATE_DIR" in refused.err
    elsewhere = replace(operator, state="elsewhere")
    elsewhere.add()
    assert elsewhere.launch("r1", "schedule.steps=40").exit_code == 0
    assert elsewhere.must("backup", "pull", "r1", "--checkpoint", "none").exit_code == 0
    elsewhere("pod", "rm", "here", "-y")
    assert list(read_only.iterdir()) == []


KILLED_IN_A_TRANSACTION = """
import os, signal, sys
from pathlib import Path
from nsa_ops.store import PodRecord, Store
store = Store(Path(sys.argv[1]))
store.add_pod(PodRecord("whole", "pod-1", "local", "/p", "python3", "", 0.0))
store._connection.execute("BEGIN IMMEDIATE")
for number in range(2000):  # more than the page cache: some of it is in the file already
    store._connection.execute("INSERT INTO intents (at, act, subject, detail) VALUES (0, ?, '', ?)",
                              (str(number), "x" * 4000))
store.add_pod(PodRecord("half", "pod-2", "local", "/p", "python3", "", 0.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_registry_that_is_killed_in_a_transaction_has_all_of_it_or_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "registry.sqlite"
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_IN_A_TRANSACTION), str(path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    store = Store(path)
    assert [pod.name for pod in store.pods()] == ["whole"]
    assert store.open_intents() == []
    with store.intent("launch", "r1"):
        assert [intent.act for intent in store.open_intents()] == ["launch"]
    store.close()


def test_long_folders_for_sockets_are_passed_over_and_the_link_is_shared(
    server: SshServer, tmp_path: Path
) -> None:
    """What fails with `ControlPath ~/.ssh/control-%r@%h-%p` on a long host name or home."""
    target = server.target(tmp_path / "s")
    long = tmp_path / ("x" * 120)
    target = replace(
        target, settings=replace(target.settings, socket_dirs=(long, server.sockets / "n"))
    )
    with openssh(target) as transport:
        assert transport.run(["echo", "OK"], timeout_s=20).stdout == b"OK\n"
        assert transport.control_path.parent == server.sockets / "n"
        assert transport.control_path.is_socket()
    assert not long.exists()


def processes_with(word: bytes, *, but: set[int]) -> list[str]:
    """Processes whose command line or environment holds a word."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in but:
            continue
        for name in ("cmdline", "environ"):
            try:
                content = (folder / name).read_bytes()
            except OSError:  # it ended, or the kernel keeps it to itself
                continue
            if word in content:
                found.append(f"{folder.name} {name}: {(folder / 'comm').read_text().strip()}")
    return found


def test_a_secret_of_the_operator_is_in_no_process_no_log_and_no_audit(pod: SshPod) -> None:
    """HF_TOKEN is set for the command line alone: neither ssh nor the pod may have it."""
    pod.add()
    ours = {os.getpid(), os.getppid()}
    assert processes_with(CANARY.encode(), but=ours) == []
    assert pod.launch("r1", LONG).exit_code == 0
    watching = pod.start("watch", "--json")
    assert watching.stdout is not None
    watching.stdout.readline()
    found = processes_with(CANARY.encode(), but={*ours, watching.pid})
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=30)
    assert found == []
    said = pod.must("backup", "pull", "r1", "--json")
    assert CANARY not in said.err
    for folder in (pod.folder / "state", pod.root / "runs", Path(said.data["folder"])):
        for path in folder.rglob("*"):
            assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    environment = pod.tmux("show-environment", "-g")
    assert CANARY not in environment
    assert re.search(r"^PATH=", environment, re.MULTILINE)
    assert first_broken_line(pod.folder / "state" / "audit.jsonl") is None
