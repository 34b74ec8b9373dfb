"""Folders by rsync over the shared link, against a real sshd and a link that is cut."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_ops.errors import (
    NotFoundError,
    PodUnreachableError,
    StateConflictError,
)
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.trees import PARTIAL_DIR, get_tree, put_tree
from tests.integration.ssh_server import SshServer, openssh, ssh_server
from tests.integration.tcp_proxy import Proxy, tcp_proxy

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed"),
]
NAMES = ["plain", "with space", "-rf", "quote'\"", "two\nlines", "日本", "$(id)", "*"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server(tmp_path_factory.mktemp("sshd") / "a") as running:
        yield running


@pytest.fixture
def proxy(server: SshServer) -> Iterator[Proxy]:
    with tcp_proxy(server.port) as running:
        yield running


@pytest.fixture
def transport(server: SshServer, proxy: Proxy, tmp_path: Path) -> Iterator[OpenSSHTransport]:
    with openssh(server.target(tmp_path / "s", proxy.port)) as opened:
        yield opened


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_tree_of_hostile_names_goes_there_and_back(
    transport: OpenSSHTransport, tmp_path: Path
) -> None:
    here, pod, back = (tmp_path / name for name in ("here it's", "pod", "back"))
    (here / "sub").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (here / ("sub" if number % 2 else "") / name).write_bytes(os.urandom(1000))
    put_tree(transport, here, str(pod), timeout_s=60)
    get_tree(transport, str(pod), back, timeout_s=60)
    assert contents(back) == contents(here)
    put_tree(transport, here, str(pod), timeout_s=60)
    assert contents(pod) == contents(here)


def test_a_cut_pull_keeps_the_good_file_and_goes_on_where_it_stopped(
    transport: OpenSSHTransport, proxy: Proxy, tmp_path: Path
) -> None:
    pod, back = tmp_path / "pod", tmp_path / "back"
    for folder in (pod, back):
        folder.mkdir()
    (pod / "big").write_bytes(os.urandom(8_000_000))
    (back / "big").write_bytes(b"good")
    transport.run(["true"], timeout_s=20)
    proxy.cut_in(4_000_000)
    with pytest.raises(PodUnreachableError, match="ended with code"):
        get_tree(transport, str(pod), back, timeout_s=60)
    assert (back / "big").read_bytes() == b"good"
    assert (back / PARTIAL_DIR / "big").stat().st_size > 1_000_000
    proxy.cut_after, before = None, proxy.from_server
    get_tree(transport, str(pod), back, timeout_s=60)
    assert contents(back) == contents(pod)
    assert proxy.from_server - before < 7_000_000


def test_a_missing_folder_is_not_found(transport: OpenSSHTransport, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a folder"):
        put_tree(transport, tmp_path / "no", "/tmp/x", timeout_s=60)
    with pytest.raises(NotFoundError, match="does not exist"):
        get_tree(transport, str(tmp_path / "no"), tmp_path / "back", timeout_s=60)


def test_a_start_up_file_that_prints_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    home, back = tmp_path / "home", tmp_path / "back"
    home.mkdir()
    back.mkdir()
    (home / ".bashrc").write_text('echo -e "\\e[33mOnly these paths are persistent\\e[0m"\n')
    with (
        ssh_server(tmp_path / "sshd", environment={"HOME": str(home)}) as noisy,
        openssh(noisy.target(tmp_path / "s")) as transport,
        pytest.raises(StateConflictError, match=r"start-up file .* prints output") as caught,
    ):
        get_tree(transport, str(home), back, timeout_s=60)
    assert ".bashrc" in caught.value.hint
    assert list(back.iterdir()) == []
