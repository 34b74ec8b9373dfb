"""The pod image: sshd accepts its configuration, and a pod that nobody can enter does not start."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 operator"


def effective(repository: Path) -> dict[str, str]:
    """The settings that sshd itself reads out of docker/sshd.conf."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if sshd is None:
        pytest.skip("sshd is not installed here")
    done = subprocess.run(
        [sshd, "-T", "-f", repository / "docker/sshd.conf"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "privilege separation" in done.stderr or "no hostkeys" in done.stderr:
        pytest.skip(f"sshd is not set up here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def test_sshd_of_a_pod_takes_keys_only_and_forwards_local_ports_only(repository: Path) -> None:
    settings = effective(repository)
    assert settings["passwordauthentication"] == "no"
    assert settings["kbdinteractiveauthentication"] == "no"
    assert settings["authenticationmethods"] == "publickey"
    assert settings["permitrootlogin"] in {"without-password", "prohibit-password"}
    assert settings["allowtcpforwarding"] == "local"
    assert settings["allowagentforwarding"] == "no"
    assert settings["x11forwarding"] == "no"


def start_pod(root: Path, repository: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run docker/start-pod.sh with stand-ins for ssh-keygen and sshd, in a home of its own."""
    stand_ins = root / "bin"
    stand_ins.mkdir()
    for name in ("ssh-keygen", "sshd"):
        (stand_ins / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (stand_ins / name).chmod(0o755)
    return subprocess.run(
        [repository / "docker/start-pod.sh"],
        env={"PATH": f"{stand_ins}:{os.environ['PATH']}", "HOME": str(root)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_pod_without_a_public_key_does_not_start(tmp_path: Path, repository: Path) -> None:
    done = start_pod(tmp_path, repository)
    assert done.returncode == 2
    assert "PUBLIC_KEY" in done.stderr
    assert "sshd" not in done.stdout


def test_a_pod_lets_in_the_key_it_was_given_and_no_one_else(
    tmp_path: Path, repository: Path
) -> None:
    done = start_pod(tmp_path, repository, PUBLIC_KEY=KEY)
    assert done.stdout.splitlines() == ["ssh-keygen -A", "sshd -D -e"]
    keys = tmp_path / ".ssh/authorized_keys"
    assert keys.read_text() == f"{KEY}\n"
    assert keys.stat().st_mode & 0o077 == 0


def test_a_mounted_key_is_enough(tmp_path: Path, repository: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/authorized_keys").write_text(f"{KEY}\n")
    assert start_pod(tmp_path, repository).returncode == 0
