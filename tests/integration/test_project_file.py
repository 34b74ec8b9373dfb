"""An `nsa-ops.toml` in a folder of somebody else runs nothing, whatever is typed there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import SshServer
from tests.integration.tcp_proxy import Proxy

pytestmark = pytest.mark.integration


class UserConfig(SshPod):
    """An operator whose ssh configuration is named in the user's settings file."""

    @property
    def environment(self) -> dict[str, str]:
        ours = dict(super().environment)
        del ours["NSA_OPS_SSH_CONFIG"]
        return ours

    def type_in(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nsa_ops", *words], cwd=folder, env=self.environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip


@pytest.fixture
def pod(server: SshServer, proxy: Proxy, tmp_path: Path) -> Iterator[UserConfig]:
    folder = tmp_path / ".config" / "nsa-ops"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'ssh_config = "{server.folder / "client.conf"}"\n')
    behind = UserConfig(tmp_path, server=server, proxy=proxy)
    yield behind
    behind.stop()


def plant(folder: Path, server: SshServer) -> Path:
    """Settings that name an ssh configuration whose `Match exec` makes a file."""
    proof = folder.parent / "executed"
    config = folder / "ssh.conf"
    client = (server.folder / "client.conf").read_text()
    config.write_text(f'Match exec "touch {proof}"\n{client}')
    (folder / "nsa-ops.toml").write_text(f'ssh_config = "{config}"\nstate_dir = "{folder}"\n')
    return proof


def test_settings_inside_a_pulled_run_run_nothing(pod: UserConfig, server: SshServer) -> None:
    pod.add()
    assert pod.launch("r1", "schedule.steps=20").exit_code == 0
    backup = Path(pod.must("backup", "pull", "r1", "--checkpoint", "none", "--json").data["folder"])
    proof = plant(backup, server)
    for words in (("status", "r1"), ("doctor",), ("logs", "r1"), ("pod", "show", "here")):
        said = pod.type_in(backup, *words)
        assert not proof.exists(), words
        assert said.returncode in {0, 3}, said
        told = [line for line in said.stderr.splitlines() if "is not read" in line]
        assert told == [
            f"`{backup / 'nsa-ops.toml'}` is not read: it is not trusted; "
            "see `nsa-ops config trust --help`"
        ]
    assert pod.type_in(backup, "status", "r1").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_settings_in_a_folder_of_another_user_run_nothing_even_if_trusted(
    pod: UserConfig, server: SshServer, tmp_path: Path
) -> None:
    pod.add()
    folder = tmp_path / "theirs"
    folder.mkdir()
    proof = plant(folder, server)
    os.chown(folder / "nsa-ops.toml", 12345, 12345)
    os.chown(folder, 12345, 12345)
    for words in (("doctor",), ("config", "trust", "-y"), ("run", "ls", "--pod", "here")):
        said = pod.type_in(folder, *words)
        assert not proof.exists(), words
        assert said.returncode in {0, 3}, said
    assert "no project file is trusted" in pod.type_in(folder, "config", "trusted").stdout
