"""Addresses, sockets and configurations: what OpenSSH makes of them is what we use."""

import os
import shutil
from pathlib import Path

import pytest

from nsa_ops.errors import ConfigurationError, LocalResourceError
from nsa_ops.remote.openssh import known_terminal
from nsa_ops.remote.ssh.config import Resolved, parse_resolved, resolve
from nsa_ops.remote.ssh.host_keys import HostKey, parse_known_hosts, pin
from nsa_ops.remote.ssh.target import (
    MAX_SOCKET_PATH,
    Address,
    SshSettings,
    SshTarget,
    choose_socket,
    command_options,
    parse_address,
    socket_name,
)

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")


def asked(config: Path, host: str) -> Resolved:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}
    return resolve(Address(host), SshSettings(config.parent, (), environment, config))


@pytest.fixture
def cases(shared: Path) -> Path:
    return shared / "cases" / "ssh"


def test_missing_includes_and_match_host_lists(cases: Path) -> None:
    found = asked(cases / "S01_include_glob_match_host_controlpath_C.conf", "pf")
    assert (found.user, found.host, found.port) == ("trainer", "pod1.example.org", 22)
    assert "~/.ssh/auth_rsa" in found.identity_files


def test_match_all_before_an_include_at_the_end(cases: Path) -> None:
    found = asked(cases / "S02_match_all_then_include_at_end.conf", "pod")
    assert str(found) == "root@pod.example.org:40022"


def test_a_jump_before_a_command_wins_and_percent_h_is_the_host(cases: Path) -> None:
    config = cases / "S03_hostname_percent_h_jump_and_command_both_set.conf"
    work = asked(config, "work")
    assert (work.proxy_jump, work.proxy_command) == ("jump", "")
    assert str(work) == "user1@localhost:22222 through jump"
    assert asked(config, "node1").host == "node1.lan"


def test_match_host_with_an_equals_sign(cases: Path) -> None:
    config = cases / "S04_match_host_equals_syntax.conf"
    assert asked(config, "myhost7.example.org").user == "alpha"
    assert str(asked(config, "gpu1")) == "beta@gpu1:2222"
    assert asked(config, "badhost").user not in {"alpha", "beta", "gamma"}


def test_a_configuration_that_ssh_refuses_is_no_network_error(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  NoSuchOption yes\n")
    with pytest.raises(ConfigurationError, match="Bad configuration option: nosuchoption"):
        asked(config, "pod")


def test_what_ssh_cannot_resolve_is_the_configuration_too(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  HostName %q.lan\n")
    with pytest.raises(ConfigurationError, match=r"cannot resolve `pod`: .*%q"):
        asked(config, "pod")


def test_an_answer_without_a_host_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gave no host name"):
        parse_resolved("port 22\n")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("root@192.0.2.7", Address("192.0.2.7", "root")),
        ("u.x@pod-1.example.org:40022", Address("pod-1.example.org", "u.x", 40022)),
        ("root@[2001:db8::7]:22", Address("2001:db8::7", "root", 22)),
        ("root@[fe80::1%eth0]", Address("fe80::1%eth0", "root")),
        ("gpu", Address("gpu")),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


def test_an_address_of_ipv6_needs_no_brackets() -> None:
    assert parse_address("root@2001:db8::7:22") == Address("2001:db8::7:22", "root")
    assert parse_address("fd00::1") == Address("fd00::1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-oProxyCommand=x",
        "root@-x",
        "a b",
        "u@h:0",
        "u@h:70000",
        "u@h:x",
        "u@h;id",
        "$(id)@h",
        "u@fd00:::1",
        "-x@fd00::1",
    ],
)
def test_an_address_that_could_be_an_option_or_a_command_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_address(text)


def test_the_socket_is_short_or_the_reason_is_clear() -> None:
    long, short = Path("/srv/u/" + "x" * 80), Path("/tmp/nsa-ops-0")
    assert choose_socket([long, short], "0123456789abcdef").parent == short
    with pytest.raises(LocalResourceError, match=f"may have {MAX_SOCKET_PATH} here"):
        choose_socket([long], "0123456789abcdef")


def test_another_key_or_login_never_shares_a_link(tmp_path: Path) -> None:
    def name(user: str, pinned: str) -> str:
        settings = SshSettings(tmp_path, ())
        return socket_name(SshTarget("p", "pod-1", Address("h", user), settings), pinned)

    assert len({name("a", "k1"), name("a", "k2"), name("b", "k1")}) == 3


def test_every_connection_is_strict_bounded_and_forwards_nothing(tmp_path: Path) -> None:
    target = SshTarget("p", "pod-1", Address("h", "u"), SshSettings(tmp_path / "a b%", ()))
    options = command_options(target, Path("/tmp/s"))
    expected = {
        "BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3", "HostKeyAlias": "nsa-pod-1", "StrictHostKeyChecking": "yes",
        "ForwardAgent": "no", "ForwardX11": "no", "Ciphers": "^aes128-gcm@openssh.com",
        "UserKnownHostsFile": f'"{tmp_path}/a b%%/known_hosts/pod-1"',
    }  # fmt: skip
    assert expected.items() <= options.items()


def test_a_fingerprint_is_the_one_that_ssh_prints(tmp_path: Path) -> None:
    line = "host ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl\n"
    (key,) = parse_known_hosts("# a comment\n" + line)
    assert key == HostKey("ssh-ed25519", line.split()[2])
    assert key.fingerprint == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


@pytest.mark.parametrize(
    ("term", "told"),
    [("xterm-kitty", "xterm-256color"), ("xterm-ghostty", "xterm-256color"), ("", "xterm-256color"),
     ("xterm", "xterm"), ("screen-256color", "screen-256color"), ("vt100", "vt100")],
)  # fmt: skip
def test_a_terminal_that_the_pod_may_not_know_is_replaced(term: str, told: str) -> None:
    assert known_terminal(term) == told


@pytest.mark.parametrize("mask", [0o000, 0o002])
def test_what_ssh_reads_of_ours_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    target = SshTarget("p", "pod-1", Address("h"), SshSettings(tmp_path / "state", ()))
    before = os.umask(mask)
    try:
        pin(target, HostKey("ssh-ed25519", "AAAA"))
    finally:
        os.umask(before)
    modes = [one.stat().st_mode & 0o777 for one in (target.known_hosts, target.known_hosts.parent)]
    assert modes == [0o600, 0o700]
