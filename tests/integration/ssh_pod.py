"""A pod behind a real sshd and a proxy, operated by the real command or by its use cases."""

import subprocess
from dataclasses import dataclass
from functools import partial

from nsa_ops.clock import SystemClock
from nsa_ops.context import Connect, Operator, connect_audited
from nsa_ops.settings import read_settings
from nsa_ops.store import Store
from tests.integration.local_pod import LocalPod
from tests.integration.ssh_server import SshServer
from tests.integration.tcp_proxy import Proxy
from tests.integration.warm import Said


@dataclass(frozen=True, kw_only=True)
class SshPod(LocalPod):
    """A pod named `here` that is reached through a proxy in front of sshd."""

    server: SshServer
    proxy: Proxy
    state: str = "state"

    @property
    def environment(self) -> dict[str, str]:
        ours = {
            "NSA_OPS_SSH_CONFIG": str(self.server.folder / "client.conf"),
            "XDG_RUNTIME_DIR": str(self.server.sockets),
            "NSA_OPS_STATE_DIR": str(self.folder / self.state),
        }
        return super().environment | ours

    @property
    def address(self) -> str:
        return f"{self.server.user}@127.0.0.1:{self.proxy.port}"

    def add_as(self, name: str, *more: str) -> Said:
        root, python = str(self.root), str(self.write_python())
        words = ("--root", root, "--python", python, "--profile", "cpu", "--json", *more)
        return self("pod", "add", name, self.address, *words)

    def add(self) -> None:
        said = self.add_as("here", "--fingerprint", self.server.host_key.fingerprint)
        assert said.exit_code == 0, said

    def stop(self) -> None:
        super().stop()
        self("pod", "rm", "here", "-y")

    def refuse_until_noticed(self, following: subprocess.Popen[bytes]) -> bytes:
        """Refuse all connections until a command says that it tries again; what it said."""
        assert following.stderr is not None
        self.proxy.is_refusing = True
        self.proxy.cut()
        said = b""
        for line in following.stderr:
            said += line
            if b"trying again; the run is not affected" in line:
                break
        self.proxy.is_refusing = False
        return said

    def operator(self, connect: Connect = connect_audited) -> Operator:
        """The operator of the command line, in this process; the caller closes its store."""
        settings = read_settings(self.environment, folder=self.folder)
        return Operator(
            settings=settings,
            store=Store(settings.state_dir / "registry.sqlite"),
            clock=SystemClock(),
            tell=partial(str.strip),
            connect=connect,
        )
