"""Every test of the operator's side has a state folder of its own and no settings from outside."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_ops.store import Store
from tests.ops.cli_case import CommandLine
from tests.ops.operators import POD, Desk


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith("NSA_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NSA_OPS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    store = Store(tmp_path / "registry.sqlite")
    store.add_pod(POD)
    yield Desk(store)
    store.close()
