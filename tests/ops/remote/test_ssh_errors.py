"""The words of ssh, and what they are for the operator."""

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
from nsa_ops.remote.ssh_errors import explain_ssh

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


def test_a_login_shell_that_ends_first_is_not_a_dead_link() -> None:
    error = explain_ssh(3, "bye", "u@pod:22", "a100")
    assert isinstance(error, StateConflictError)
    assert "ended with code 3 before our command: bye" in error.message


def test_the_cases_from_outside_are_named(shared) -> None:
    ssh = shared / "cases" / "ssh"
    long_path = (ssh / "S10_controlpath_too_long.txt").read_text()
    gateway = (ssh / "S11_proxy_gateway_needs_pty_no_sftp.txt").read_text()
    fish = (ssh / "S07_fish_login_shell_errors.txt").read_text()
    assert isinstance(explain_ssh(255, long_path, "pod", "p"), LocalResourceError)
    assert isinstance(explain_ssh(1, gateway, "pod", "p"), RefusedError)
    assert isinstance(explain_ssh(127, fish, "pod", "p"), StateConflictError)
