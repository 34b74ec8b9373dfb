"""The operator's deadline bounds every call of a door, whatever the call asks for."""

import os
from pathlib import Path

import pytest

from nsa_ops.context import open_transport
from nsa_ops.errors import DeadlineError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.settings import read_settings
from nsa_ops.store import PodRecord


def test_no_call_takes_longer_than_the_door_allows() -> None:
    door = LocalTransport({"PATH": os.environ["PATH"]}, longest_s=0.2)
    with pytest.raises(DeadlineError, match=r"within 0\.2 s"):
        door.run(("sleep", "30"), timeout_s=60)


@pytest.mark.parametrize(("kind", "address"), [("local", ""), ("ssh", "me@127.0.0.1:22")])
def test_a_door_is_opened_with_the_deadline(tmp_path: Path, kind: str, address: str) -> None:
    settings = read_settings({"NSA_OPS_STATE_DIR": str(tmp_path)}, folder=tmp_path)
    pod = PodRecord("p", "id", kind, "/pod", "python3", "cpu", 1.0, address)
    door = open_transport(pod, settings, longest_s=3.0)
    assert door.longest_s == 3.0  # type: ignore[attr-defined]
