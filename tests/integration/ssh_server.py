"""A real sshd of this user on a free loopback port, with keys and a configuration of its own."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nsa_ops.remote.framed import FramedTransport
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.ssh.host_keys import HostKey, parse_known_hosts, pin
from nsa_ops.remote.ssh.target import Address, SshSettings, SshTarget

_START_S = 10.0
_CONFIG = """\
Port {port}
ListenAddress {host}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
LogLevel VERBOSE
"""
_CLIENT = """\
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  IdentityAgent none
"""


def require_sshd() -> str:
    """Path of sshd; the test is skipped where it cannot be run."""
    program = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("sshd and ssh are not both installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True, mode=0o755)
    return program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True
    )


@dataclass(frozen=True)
class SshServer:
    """A server that runs; its log tells who came in."""

    folder: Path
    port: int
    sockets: Path
    host: str = "127.0.0.1"

    @property
    def user(self) -> str:
        return pwd.getpwuid(os.getuid()).pw_name

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()

    @property
    def host_key(self) -> HostKey:
        return parse_known_hosts("host " + (self.folder / "host_key.pub").read_text())[0]

    @property
    def address(self) -> Address:
        return Address(self.host, self.user, self.port)

    def settings(self, state: Path, **more: str) -> SshSettings:
        """Settings of an operator whose only key is this server's."""
        config = self.folder / "client.conf"
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **more}
        return SshSettings(state, (self.sockets,), environment, config)

    def target(self, state: Path, port: int | None = None, pod_id: str = "pod-1") -> SshTarget:
        """A pod with this server's key pinned, perhaps behind a proxy."""
        address = Address("127.0.0.1", self.user, port or self.port)
        target = SshTarget("here", pod_id, address, self.settings(state))
        pin(target, self.host_key)
        return target


@contextmanager
def ssh_server(
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    options: str = "",
    host: str = "127.0.0.1",
    inside: Sequence[str] = (),
) -> Iterator[SshServer]:
    """Run sshd in the foreground and end it by its process id.

    Args:
        folder: New folder for its keys.
        environment: What every session gets; HOME is the folder, so rc files are put there.
        options: More lines of its configuration.
        host: Address that it listens on.
        inside: Command that runs it somewhere else, such as in a network namespace.
    """
    program = require_sshd()
    folder.mkdir(parents=True)
    make_key(folder / "host_key")
    make_key(folder / "user_key")
    # Not below the test's own folder, whose name is too long for a socket.
    sockets = tempfile.TemporaryDirectory(prefix="nsa-")
    server = SshServer(folder, free_port(), Path(sockets.name), host)
    text = _CONFIG.format(port=server.port, folder=folder, host=host) + options
    # One line: sshd heeds only the first one.
    values = {"HOME": str(folder), **(environment or {})}
    text += "\nSetEnv " + " ".join(f'"{name}={value}"' for name, value in values.items())
    (folder / "sshd.conf").write_text(text + "\n")
    (folder / "client.conf").write_text(_CLIENT.format(folder=folder))
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            [*inside, program, "-D", "-e", "-f", folder / "sshd.conf"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _await_port(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(10)
        sockets.cleanup()


def _await_port(server: SshServer, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.skip(f"sshd does not start here: {server.log.strip()}")
        if f"Server listening on {server.host} port {server.port}" in server.log:
            return
        time.sleep(0.02)
    message = f"sshd did not open port {server.port}: {server.log}"
    raise AssertionError(message)


@contextmanager
def openssh(target: SshTarget) -> Iterator[OpenSSHTransport]:
    """The transport, with its shared link ended afterwards."""
    transport = OpenSSHTransport(target)
    try:
        yield transport
    finally:
        transport.close()


@contextmanager
def over_fabric(target: SshTarget) -> Iterator[FramedTransport]:
    """The transport over Paramiko; the test is skipped where it is not installed."""
    pytest.importorskip("fabric")
    from nsa_ops.remote.fabric import FabricTransport

    transport = FabricTransport(target)
    try:
        yield transport
    finally:
        transport.close()
