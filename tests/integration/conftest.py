"""What tests with real parts share: one sshd, a pod behind it, staged text, one undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from tests.integration import trainer_runs
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import SshServer, ssh_server
from tests.integration.tcp_proxy import Proxy, tcp_proxy


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """The sshd of all tests that need no special one."""
    with ssh_server(tmp_path_factory.mktemp("sshd") / "a") as running:
        yield running


@pytest.fixture
def proxy(server: SshServer) -> Iterator[Proxy]:
    """The network between this test and sshd, which the test may cut."""
    with tcp_proxy(server.port) as running:
        yield running


@pytest.fixture
def new_pod(server: SshServer, proxy: Proxy, tmp_path: Path) -> Iterator[SshPod]:
    """A pod behind ssh that the registry does not know yet."""
    behind = SshPod(tmp_path, server=server, proxy=proxy)
    yield behind
    behind.stop()


@pytest.fixture
def pod(new_pod: SshPod) -> SshPod:
    """A pod behind ssh that the registry knows as `here`."""
    new_pod.add()
    return new_pod


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all trainers keep their staged text, so that only the first one makes it."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> RunDir:
    """A run of 24 steps from beginning to end."""
    run = trainer_runs.make_run(tmp_path_factory.mktemp("undisturbed"), shards, "whole")
    assert trainer_runs.start_from_shell(run) == 0, run.log.read_text()
    return run
