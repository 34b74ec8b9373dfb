"""A new pod that only takes a password: one login puts our key there; the password is nowhere."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import SshServer, ssh_server
from tests.integration.tcp_proxy import tcp_proxy

USER = "nsa-first-login"
PASSWORD = "pass-canary 7d'\"$(id)"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a user with a password"),
    pytest.mark.skipif(
        shutil.which("useradd", path="/usr/sbin:/sbin") is None, reason="useradd is not installed"
    ),
]
_ONLY_PASSWORDS = f"""
Match User {USER}
  PasswordAuthentication yes
  AuthorizedKeysFile .ssh/authorized_keys
"""


@dataclass(frozen=True, kw_only=True)
class NewPod(SshPod):
    """A pod whose login nobody has a key for."""

    home: Path

    @property
    def address(self) -> str:
        return f"{USER}@127.0.0.1:{self.proxy.port}"

    @property
    def keys(self) -> Path:
        return self.home / ".ssh" / "authorized_keys"

    def add_with(self, password: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *self.command, "pod", "add", "here", self.address, "--profile", "cpu",
                "--fingerprint", self.server.host_key.fingerprint, "--password-from", *more,
            ],
            input=password, cwd=self.folder, env=self.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture
def new_pod(tmp_path: Path) -> Iterator[NewPod]:
    pytest.importorskip("fabric")
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nsa-home-")))
        home.chmod(0o755)
        subprocess.run(
            ["/usr/sbin/useradd", "--home-dir", home, "--shell", "/bin/sh", USER], check=True
        )
        stack.callback(subprocess.run, ["/usr/sbin/userdel", "--force", USER], capture_output=True)
        shutil.chown(home, USER)
        hashed = f"{USER}:{PASSWORD}\n"
        subprocess.run(["/usr/sbin/chpasswd"], input=hashed, text=True, check=True)
        options = {"environment": {"HOME": str(home)}, "options": _ONLY_PASSWORDS}
        server: SshServer = stack.enter_context(ssh_server(tmp_path / "sshd", **options))
        proxy = stack.enter_context(tcp_proxy(server.port))
        yield NewPod(tmp_path, server=server, proxy=proxy, home=home)


def is_nowhere(pod: NewPod) -> bool:
    """No file of the operator or of the pod holds the password."""
    files = [path for folder in (pod.folder, pod.home) for path in folder.rglob("*")]
    return not [path for path in files if path.is_file() and b"pass-canary" in path.read_bytes()]


def test_a_password_on_stdin_puts_our_key_there_and_is_kept_nowhere(new_pod: NewPod) -> None:
    planned = new_pod.add_with(PASSWORD + "\n", "-", "--plan")
    assert (planned.returncode, "install key" in planned.stdout) == (0, True), planned
    assert not new_pod.keys.exists()
    added = new_pod.add_with(PASSWORD + "\n", "-")
    assert added.returncode == 0, added
    ours = (new_pod.server.folder / "user_key.pub").read_text()
    assert new_pod.keys.read_text() == ours
    facts = new_pod.keys.stat()
    assert (facts.st_mode & 0o777, facts.st_uid) == (0o600, pwd.getpwnam(USER).pw_uid)
    assert is_nowhere(new_pod)
    log = new_pod.server.log
    assert (log.count("Accepted password"), log.count("Accepted publickey")) == (1, 1)
    assert new_pod.must("pod", "show", "--json").data["pod"]["kind"] == "ssh"
    new_pod.must("pod", "rm", "here", "-y")


def test_a_key_that_is_there_already_is_not_added_twice_and_others_stay(new_pod: NewPod) -> None:
    secret = new_pod.folder / "secret"
    secret.write_text(PASSWORD)
    loose = new_pod.add_with("", str(secret))
    assert (loose.returncode, "others may read it" in loose.stderr) == (11, True), loose
    new_pod.keys.parent.mkdir()
    new_pod.keys.write_text("ssh-ed25519 AAAA somebody-else")
    for path in (new_pod.keys.parent, new_pod.keys):
        shutil.chown(path, USER)
    secret.chmod(0o600)
    for state in ("one", "two"):
        operator = replace(new_pod, state=state)
        assert operator.add_with("", str(secret)).returncode == 0
        operator("pod", "rm", "here", "-y")
    secret.unlink()
    ours = (new_pod.server.folder / "user_key.pub").read_text()
    assert new_pod.keys.read_text() == f"ssh-ed25519 AAAA somebody-else\n{ours}"
    assert is_nowhere(new_pod)


def test_a_wrong_password_leaves_no_pod_and_no_key(new_pod: NewPod) -> None:
    refused = new_pod.add_with("another\n", "-")
    assert (refused.returncode, "refuses our login" in refused.stderr) == (4, True), refused
    assert "Check the password" in refused.stderr
    assert not new_pod.keys.exists()
    assert new_pod("pod", "show").exit_code == 6
    nobody = new_pod.add_with("", "ask")
    assert (nobody.returncode, "cannot be asked for" in nobody.stderr) == (2, True), nobody
