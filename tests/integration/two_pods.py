"""Two pods of their own: each a network namespace with its own sshd, tmux server and folder.

The pods reach each other over one pair of interfaces, and this machine reaches each of them over
another: a pod has two addresses, and the other pod reaches only one of them.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_ops.remote.snapshot import code_root
from tests.integration.local_pod import end_runs
from tests.integration.shipped_code import put_code
from tests.integration.ssh_server import SshServer, ssh_server
from tests.integration.warm import Said, agent_server, run_warm
from tests.integration.warm_agent import write_client
from tests.tmux_server import end_server

#: Third part of the addresses: this machine with a, with b, and a with b.
_WITH_A, _WITH_B, BETWEEN = 11, 12, 13
SOCKET = "nsa"
#: Of the path between the pods, in each direction: 7.5 MB/s.
RATE, RATE_MB_PER_S = "60mbit", 7.5


def require_namespaces() -> None:
    """Skip the test where no network namespace can be made."""
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root only")
    name = f"nsa-try-{secrets.token_hex(2)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _choose_network() -> str:
    """The first half of addresses that nothing here has, not even what a killed test has left."""
    used = subprocess.run(
        ["ip", "-4", "-o", "addr", "show"], check=True, capture_output=True, text=True
    ).stdout
    free = [f"10.{number}" for number in range(64, 255) if f" 10.{number}." not in used]
    return secrets.choice(free)


def _join(one: str, other: str, network: str) -> tuple[str, str]:
    """A pair of interfaces, one end in each namespace; an empty name is this machine."""
    ends = [f"nsa{secrets.token_hex(3)}{side}" for side in "ab"]
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for number, (namespace, end) in enumerate(zip((one, other), ends, strict=True), start=1):
        inside = ["-n", namespace] if namespace else []
        if namespace:
            _ip("link", "set", end, "netns", namespace)
        _ip(*inside, "addr", "add", f"{network}.{number}/30", "dev", end)
        _ip(*inside, "link", "set", end, "up")
    return ends[0], ends[1]


def _slow_down(namespace: str, end: str) -> bool:
    """Limit what an interface sends, so that ranks wait; False where the kernel cannot."""
    words = ("qdisc", "add", "dev", end, "root", "tbf", "rate", RATE, "burst", "64kb")
    argv = ["ip", "netns", "exec", namespace, "tc", *words, "latency", "400ms"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@contextmanager
def namespaces() -> Iterator[tuple[str, str, str, bool]]:
    """Two namespaces that reach each other and this machine, their network, and if it is slow."""
    require_namespaces()
    network = _choose_network()
    mark = secrets.token_hex(3)
    names = (f"nsa-{mark}-a", f"nsa-{mark}-b")
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _join("", names[0], f"{network}.{_WITH_A}")
        _join("", names[1], f"{network}.{_WITH_B}")
        ends = _join(*names, f"{network}.{BETWEEN}")
        pairs = zip(names, ends, strict=True)
        yield *names, network, all(_slow_down(name, end) for name, end in pairs)
    finally:
        for name in made:  # its interfaces go with it
            _ip("netns", "del", name)


@dataclass(frozen=True)
class NamespacePod:
    """One pod: its server, and where it keeps everything."""

    name: str
    server: SshServer
    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "pod"

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.root / "runs" / run_id)

    def write_python(self) -> Path:
        """Its interpreter: trainers are its own, and 60 short agents are forked from a warm one."""
        put_code(self.root)
        python = self.folder / "python"
        write_client(python, agent_server(), code_root())
        return python

    def stop(self) -> None:
        end_server(SOCKET, str(self.folder))
        end_runs(self.root)


@dataclass(frozen=True)
class TwoPods:
    """A laptop and its two pods, `a` and `b`."""

    folder: Path
    a: NamespacePod
    b: NamespacePod
    network: str
    is_slow: bool

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(code_root()),
            "NSA_OPS_STATE_DIR": str(self.folder / "state"),
            "NSA_OPS_SSH_CONFIG": str(self.folder / "client.conf"),
            "XDG_RUNTIME_DIR": str(self.a.server.sockets),
        }

    def __call__(self, *words: str) -> Said:
        return run_warm(words, folder=self.folder, environment=self.environment, limit_s=180)

    def must(self, *words: str) -> Said:
        said = self(*words)
        assert said.exit_code == 0, (words, said)
        return said

    def add(self) -> None:
        """Let the laptop know both."""
        keys = "".join(f"  IdentityFile {pod.server.folder}/user_key\n" for pod in (self.a, self.b))
        config = f"Host *\n{keys}  IdentitiesOnly yes\n  IdentityAgent none\n"
        (self.folder / "client.conf").write_text(config)
        for pod in (self.a, self.b):
            self.must(
                "pod", "add", pod.name, str(pod.server.address), "--root", str(pod.root),
                "--python", str(pod.write_python()), "--profile", "cpu",
                "--fingerprint", pod.server.host_key.fingerprint,
            )  # fmt: skip


@contextmanager
def two_pods(folder: Path) -> Iterator[TwoPods]:
    """Both pods, known to the laptop; everything that was started is ended afterwards."""
    with ExitStack() as stack:
        *names, network, is_slow = stack.enter_context(namespaces())
        pods = []
        for name, namespace, place in zip("ab", names, (_WITH_A, _WITH_B), strict=True):
            home = folder / name
            environment = {"TMUX_TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
            server = stack.enter_context(
                ssh_server(
                    home, environment=environment, host=f"{network}.{place}.2",
                    inside=("ip", "netns", "exec", namespace),
                )
            )  # fmt: skip
            pod = NamespacePod(name, server, home)
            stack.callback(pod.stop)
            pods.append(pod)
        both = TwoPods(folder, *pods, network, is_slow)
        both.add()
        stack.callback(lambda: [both("pod", "rm", pod.name, "-y") for pod in pods])
        yield both
