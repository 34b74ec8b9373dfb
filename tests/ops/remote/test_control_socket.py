"""Whether a master answers on a control socket, and which sockets make room for a new one."""

import socket
import struct
from pathlib import Path

import pytest

from nsa_ops.remote import openssh
from nsa_ops.remote.openssh import ask_master, drop_silent
from tests.ops.remote.control_masters import MASTER, listener


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "0123456789abcdef"


@pytest.mark.parametrize(
    ("says", "link"),
    [
        (MASTER, "open"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "silent"),
        (MASTER[:14], "silent"),
        (struct.pack(">I", 2**31), "silent"),
        (MASTER[:12] + struct.pack(">III", 8, 0x80000003, 1), "silent"),
        (b"", "silent"),
        (None, "silent"),
    ],
)
def test_only_a_master_that_answers_has_an_open_link(
    path: Path, says: bytes | None, link: str
) -> None:
    with listener(path, says):
        assert ask_master(path, timeout_s=0.2) == link


def test_a_socket_that_nobody_listens_on_is_left_to_ssh(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    assert ask_master(path) == "dead"
    assert (drop_silent(path), path.exists()) == (False, True)


def test_a_silent_socket_is_removed_and_an_open_one_and_a_file_are_not(path: Path) -> None:
    assert not drop_silent(path)
    path.write_text("no socket")
    assert not drop_silent(path)
    path.unlink()
    with listener(path, MASTER):
        assert (drop_silent(path), path.exists()) == (False, True)
    path.unlink()
    with listener(path, b"?"):
        assert (drop_silent(path), path.exists()) == (True, False)
    assert openssh.ANSWER_S < 5
