"""The end of input is sent before a channel is closed: behind it, sshd ends the connection."""

import time
from pathlib import Path

import pytest

from nsa_ops.remote import fabric
from nsa_ops.remote.fabric import FabricTransport
from nsa_ops.remote.ssh.target import Address, SshSettings, SshTarget


class SlowChannel:
    """A channel whose end of input takes a moment to be sent."""

    exit_status = -1

    def __init__(self) -> None:
        self.sent: list[str] = []

    def exit_status_ready(self) -> bool:
        return False

    def sendall(self, piece: bytes) -> None:
        self.sent.append(piece.decode())

    def shutdown_write(self) -> None:
        time.sleep(0.1)
        self.sent.append("end")

    def close(self) -> None:
        self.sent.append("close")


def test_a_channel_is_closed_behind_the_end_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = SlowChannel()

    def fail(*_: object) -> None:
        message = "full"
        raise OSError(message)

    monkeypatch.setattr(fabric, "_drain", fail)
    monkeypatch.setattr(FabricTransport, "_open_in_time", lambda *_: channel)
    target = SshTarget("p", "pod-1", Address("h"), SshSettings(tmp_path / "state", ()))
    with pytest.raises(OSError, match="full"):
        FabricTransport(target).run(["true"], timeout_s=5)
    assert channel.sent[-2:] == ["end", "close"]
