"""Folders by rsync over the shared link, against a real sshd and a link that is cut."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from nsa_ops.errors import (
    NotFoundError,
    PodUnreachableError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.trees import PARTIAL_DIR, put_tree
from tests.integration.pod_runs import wait_for
from tests.integration.ssh_server import SshServer, openssh, ssh_server
from tests.integration.tcp_proxy import Proxy

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed"),
]
NAMES = ["plain", "with space", "-rf", "quote'\"", "two\nlines", "日本", "$(id)", "*"]


@pytest.fixture
def transport(server: SshServer, proxy: Proxy, tmp_path: Path) -> Iterator[OpenSSHTransport]:
    with openssh(server.target(tmp_path / "s", proxy.port)) as opened:
        yield opened


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def test_only_the_named_files_go_and_no_link_is_followed(
    transport: OpenSSHTransport, tmp_path: Path
) -> None:
    here, pod, secret = tmp_path / "here", tmp_path / "pod", tmp_path / "secret"
    for folder in (here, pod):
        folder.mkdir()
    secret.write_text("private")
    for name in ("named", "stranger"):
        (here / name).write_text(name)
    (here / "link").symlink_to(secret)
    put_tree(transport, here, str(pod), ["named"], timeout_s=60)
    with pytest.raises(VerificationError, match="link"):
        put_tree(transport, here, str(pod), ["named", "link"], timeout_s=60)
    assert contents(pod) == {"named": b"named"}


def test_a_tree_of_hostile_names_goes_there_and_again(
    transport: OpenSSHTransport, tmp_path: Path
) -> None:
    here, pod = tmp_path / "here it's", tmp_path / "pod"
    (here / "sub").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (here / ("sub" if number % 2 else "") / name).write_bytes(os.urandom(1000))
    put_tree(transport, here, str(pod), names_in(here), timeout_s=60)
    assert contents(pod) == contents(here)
    put_tree(transport, here, str(pod), names_in(here), timeout_s=60)
    assert contents(pod) == contents(here)


def test_a_cut_copy_keeps_the_good_file_and_goes_on_where_it_stopped(
    transport: OpenSSHTransport, proxy: Proxy, tmp_path: Path
) -> None:
    here, pod = tmp_path / "here", tmp_path / "pod"
    for folder in (here, pod):
        folder.mkdir()
    (here / "big").write_bytes(os.urandom(8_000_000))
    (pod / "big").write_bytes(b"good")
    transport.run(["true"], timeout_s=20)
    proxy.delay_s = 0.003
    Timer(1.0, proxy.cut).start()
    with pytest.raises(PodUnreachableError, match="ended with code"):
        put_tree(transport, here, str(pod), names_in(here), timeout_s=60)
    proxy.delay_s = 0.0
    assert (pod / "big").read_bytes() == b"good"
    partial = pod / PARTIAL_DIR / "big"
    wait_for(partial.exists)
    assert (here / "big").read_bytes().startswith(partial.read_bytes())
    assert partial.stat().st_size > 500_000
    put_tree(transport, here, str(pod), names_in(here), timeout_s=60)
    assert contents(pod) == contents(here)


def test_a_missing_folder_is_not_found(transport: OpenSSHTransport, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a folder"):
        put_tree(transport, tmp_path / "no", "/tmp/x", [], timeout_s=60)


def test_a_start_up_file_that_prints_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    home, here, pod = (tmp_path / name for name in ("home", "here", "pod"))
    for folder in (home, here, pod):
        folder.mkdir()
    (here / "file").write_text("new")
    (home / ".bashrc").write_text('echo -e "\\e[33mOnly these paths are persistent\\e[0m"\n')
    with (
        ssh_server(tmp_path / "sshd", environment={"HOME": str(home)}) as noisy,
        openssh(noisy.target(tmp_path / "s")) as transport,
        pytest.raises(StateConflictError, match=r"start-up file .* prints output") as caught,
    ):
        put_tree(transport, here, str(pod), names_in(here), timeout_s=60)
    assert ".bashrc" in caught.value.hint
    assert list(pod.iterdir()) == []
