"""Names of hosts in ssh configurations that make other parsers crash, and which one was meant."""

import os
import shutil
from pathlib import Path

import pytest

from nsa_ops.errors import NotFoundError
from nsa_ops.remote.ssh.config import list_aliases, require_alias
from nsa_ops.remote.ssh.target import Address, SshSettings, parse_address

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")


def settings_of(config: Path | None, home: Path) -> SshSettings:
    return SshSettings(home, (), {"PATH": os.environ["PATH"], "HOME": str(home)}, config)


@pytest.mark.parametrize(
    ("case", "aliases", "known", "unknown"),
    [
        ("S01_include_glob_match_host_controlpath_C", ["gh", "pf", "eth"], "192.0.2.3", "pff"),
        ("S02_match_all_then_include_at_end", ["pod"], "pod", "pods"),
        (
            "S03_hostname_percent_h_jump_and_command_both_set",
            ["work", "jump", "primary", "node1", "node2"], "node2", "node3",
        ),
        ("S04_match_host_equals_syntax", [], "myhost7.example.org", "other"),
    ],
)  # fmt: skip
def test_every_case_is_listed_without_a_crash(
    shared: Path, tmp_path: Path, case: str, aliases: list[str], known: str, unknown: str
) -> None:
    settings = settings_of(shared / "cases" / "ssh" / f"{case}.conf", tmp_path)
    assert list_aliases(settings) == aliases
    require_alias(Address(known), settings)
    with pytest.raises(NotFoundError, match=f"`{unknown}` is no host of your ssh configuration"):
        require_alias(Address(unknown), settings)


def test_included_files_are_listed_and_patterns_are_not(tmp_path: Path) -> None:
    folder = tmp_path / ".ssh"
    (folder / "conf.d").mkdir(parents=True)
    (folder / "config").write_text(
        'Include conf.d/*.conf "none here"\nInclude config\nHOST=first "second one"\n'
        "Host *.lan !x gp?\nMatch all\n  Include ~/.ssh/last\nHost third # not fifth\n"
    )
    (folder / "conf.d" / "pods.conf").write_text("Host gpu-a gpu-b\n")
    (folder / "last").write_text("Match host=y\nHost fourth\n")
    assert sorted(list_aliases(settings_of(folder / "config", tmp_path))) == [
        "first", "fourth", "gpu-a", "gpu-b", "second one", "third"
    ]  # fmt: skip


def test_the_name_that_was_meant_is_offered(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu-a\n  HostName 192.0.2.7\nHost laptop\nHost *\n  User root\n")
    with pytest.raises(NotFoundError, match=r"did you mean `gpu-a`\?") as caught:
        require_alias(Address("gpu_a"), settings_of(config, tmp_path))
    assert "It has `gpu-a`, `laptop`" in caught.value.hint
    assert caught.value.exit_code == 6


def test_addresses_and_negated_patterns_are_read_as_ssh_reads_them(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host pod !pod\n  User never\nHost gpu-* !gpu-old\n  User trainer\n"
        "Host fd00::1\n  HostName 2001:db8::7\nHost 2001:db8::*\n  Port 2222\nHost empty\n"
        "Match originalhost matched\n  User me\nHost * !*.lan\n  ProxyJump bastion\n"
    )
    settings = settings_of(config, tmp_path)
    for name in ("gpu-1", "fd00::1", "2001:db8::9", "empty", "matched"):
        require_alias(parse_address(name), settings)
    for name in ("pod", "gpu-old", "x.lan", "fd00::2", "other"):
        with pytest.raises(NotFoundError, match=f"`{name}` is no host of your ssh configuration"):
            require_alias(parse_address(name), settings)
    assert list_aliases(settings) == ["fd00::1", "empty"]
