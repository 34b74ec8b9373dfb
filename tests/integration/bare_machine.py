"""A bare Debian user behind a real sshd: a home, the system's Python, and nothing of ours."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.local_pod import LocalPod
from tests.integration.ssh_server import SshServer, ssh_server
from tests.integration.warm import Said

#: How this machine reaches its package index: its users would have the same from their provider.
_NETWORK = (
    "PIP_",
    "UV_",
    "SSL_CERT",
    "REQUESTS_CA",
    "CURL_CA",
    "HTTP",
    "http",
    "NO_PROXY",
    "no_proxy",
)


_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, kw_only=True)
class BarePod(LocalPod):
    """A pod named `bare`: the laptop's side is a folder of the test, the pod's a user's home."""

    server: SshServer
    user: str
    home: Path

    @property
    def root(self) -> Path:
        return self.home / "nsa-pod"

    @property
    def environment(self) -> dict[str, str]:
        ours = {
            "NSA_OPS_SSH_CONFIG": str(self.server.folder / "client.conf"),
            "XDG_RUNTIME_DIR": str(self.server.sockets),
        }
        return super().environment | ours

    def add_bare(self) -> Said:
        """Make the pod, as one would by hand."""
        where = f"{self.user}@127.0.0.1:{self.server.port}"
        pin = ("--fingerprint", self.server.host_key.fingerprint)
        return self.must("pod", "add", "bare", where, "--profile", "cpu", *pin)


@contextmanager
def bare_pod(folder: Path, *, uv: Path | None = None) -> Iterator[BarePod]:
    """A new user of this machine that one can ssh into, removed again with all it owns.

    Args:
        folder: The laptop's side.
        uv: Program to put into the user's ~/.local/bin; None for none.
    """
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("making a bare user needs root and useradd")
    user = f"nsa-{secrets.token_hex(3)}"
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", user], check=True)
    home, number = Path(pwd.getpwnam(user).pw_dir), pwd.getpwnam(user).pw_uid
    # sshd reads the key file as the user, and the test's own folder is closed to others.
    keys = tempfile.TemporaryDirectory(prefix="nsa-bare-")
    Path(keys.name).chmod(0o755)
    network = {name: value for name, value in os.environ.items() if name.startswith(_NETWORK)}
    environment = {**network, "HOME": str(home), "PATH": f"{home}/.local/bin:{_PATH}"}
    try:
        if uv is not None:
            (home / ".local" / "bin").mkdir(parents=True)
            shutil.copy2(uv, home / ".local" / "bin" / "uv")
        subprocess.run(["usermod", "--password", "*", user], check=True)
        with ssh_server(Path(keys.name) / "sshd", environment=environment) as server:
            (server.folder / "user_key.pub").chmod(0o644)
            yield BarePod(folder, server=server, user=user, home=home)
    finally:
        subprocess.run(["pkill", "-KILL", "-u", user], check=False)
        subprocess.run(["userdel", "--force", "--remove", user], check=False, capture_output=True)
        shutil.rmtree(f"/tmp/tmux-{number}", ignore_errors=True)
        keys.cleanup()
