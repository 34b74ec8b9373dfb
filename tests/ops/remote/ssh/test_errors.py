"""The words of ssh, and what they are for the operator."""

from pathlib import Path

import pytest

from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    LocalResourceError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
)
from nsa_ops.remote.ssh.explain import explain_ssh

SAID = [
    ("Host key verification failed.", AuthenticationError, 4),
    ("root@pod: Permission denied (publickey).", AuthenticationError, 4),
    ("Bad owner or permissions on /srv/u/.ssh/config", LocalResourceError, 11),
    (
        "@  WARNING: UNPROTECTED PRIVATE KEY FILE!  @\nPermissions 0664 for 'k' are too open.\n"
        "u@pod: Permission denied (publickey).",
        AuthenticationError, 4,
    ),
    ('Load key "/root/.ssh/id": Permission denied', AuthenticationError, 4),
    ("/srv/u/.ssh/config: line 3: Bad configuration option: foo", ConfigurationError, 2),
    ("ssh: connect to host pod port 22: Connection refused", PodUnreachableError, 5),
    ("ssh: Could not resolve hostname pod: Name or service not known", PodUnreachableError, 5),
    ("ssh: connect to host pod port 22: Connection timed out", PodUnreachableError, 5),
    ("kex_exchange_identification: Connection closed by remote host", PodUnreachableError, 5),
    ("Timeout, server pod not responding.", PodUnreachableError, 5),
    ("client_loop: send disconnect: Broken pipe", PodUnreachableError, 5),
    ("exec request failed on channel 0", RefusedError, 3),
    ("'exec' is not recognized as an internal or external command,", RefusedError, 3),
    ("", PodUnreachableError, 5),
]  # fmt: skip


@pytest.mark.parametrize(("said", "kind", "code"), SAID)
def test_each_failure_has_its_kind_and_shows_the_words_of_ssh(
    said: str, kind: type[OpsError], code: int
) -> None:
    error = explain_ssh(255, said, "u@pod:22", "a100")
    assert (type(error), error.exit_code) == (kind, code)
    for line in said.splitlines():
        assert line.strip(" @") in error.message
    assert error.hint


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
The fingerprint for the ED25519 key sent by the remote host is
SHA256:F7LDh8guzVeohN2YrBUUD9sjThxlpIXwfB412nWQjQY.
Please contact your system administrator.
Add correct host key in /state/known_hosts/pod-1 to get rid of this message.
Offending ED25519 key in /state/known_hosts/pod-1:1
Host key for nsa-pod-1 has changed and you have requested strict checking.
Host key verification failed.
"""
JUMP_KEYS = [
    "No ED25519 host key is known for [192.0.2.1]:20422 and you have requested strict checking.\n"
    "Host key verification failed.\nkex_exchange_identification: Connection closed by remote host",
    CHANGED.replace("nsa-pod-1 has", "[192.0.2.1]:20422 has"),
    "Host key verification failed.\nkex_exchange_identification: Connection closed by remote host",
    "Host key verification failed.\nConnection closed by UNKNOWN port 65535",
]
POD_KEYS = [
    "No ED25519 host key is known for nsa-pod-1 and you have requested strict checking.\n"
    "Host key verification failed.",
    CHANGED,
    "Host key verification failed.",
]


def test_another_host_key_is_shown_by_its_fingerprint_though_the_words_are_long() -> None:
    error = explain_ssh(255, CHANGED, "u@pod:22", "a100")
    assert isinstance(error, AuthenticationError)
    assert "; it shows SHA256:F7LDh8guzVeohN2YrBUUD9sjThxlpIXwfB412nWQjQY (ED25519): " in (
        error.message
    )
    assert "`nsa-ops pod trust a100`" in error.hint


@pytest.mark.parametrize("said", JUMP_KEYS)
def test_the_key_of_a_jump_is_not_called_that_of_the_pod(said: str) -> None:
    error = explain_ssh(255, said, "u@pod:22", "a100")
    assert isinstance(error, AuthenticationError)
    assert error.message.startswith("The host key of the jump on the way to u@pod:22 is unknown")
    assert "pod trust" not in error.hint


@pytest.mark.parametrize("said", POD_KEYS)
def test_the_key_of_a_pod_is_not_called_that_of_a_jump(said: str) -> None:
    error = explain_ssh(255, said, "u@pod:22", "a100")
    assert error.message.startswith("The host key of u@pod:22 is not the pinned one")


def test_the_name_of_a_host_keeps_its_case() -> None:
    said = "Permission denied (publickey)."
    assert explain_ssh(255, said, "gpu", "a100").message.startswith("gpu refuses our login: ")


def test_a_login_shell_that_ends_first_is_not_a_dead_link() -> None:
    error = explain_ssh(3, "bye", "u@pod:22", "a100")
    assert isinstance(error, StateConflictError)
    assert "ended with code 3 before our command: bye" in error.message


def test_the_cases_from_outside_are_named(shared: Path) -> None:
    ssh = shared / "cases" / "ssh"
    long_path = (ssh / "S10_controlpath_too_long.txt").read_text()
    gateway = (ssh / "S11_proxy_gateway_needs_pty_no_sftp.txt").read_text()
    fish = (ssh / "S07_fish_login_shell_errors.txt").read_text()
    assert isinstance(explain_ssh(255, long_path, "pod", "p"), LocalResourceError)
    assert isinstance(explain_ssh(1, gateway, "pod", "p"), RefusedError)
    assert isinstance(explain_ssh(127, fish, "pod", "p"), StateConflictError)
