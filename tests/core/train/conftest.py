"""Fakes and small runs shared by the tests of the trainer."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_core.train.telemetry import Telemetry
from tests.core.train.sessions import write_texts


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run directory `r1`."""
    root = tmp_path / "runs" / "r1"
    root.mkdir(parents=True)
    return RunDir(root)


@pytest.fixture
def manifest(run: RunDir) -> RunManifest:
    """The manifest of attempt 1 of `r1`, on the disk as well."""
    written = RunManifest(
        run_id="r1", config=RunConfig(), config_sha256="c0ffee", created_unix_s=time.time()
    )
    write_manifest(run, written)
    return written


@pytest.fixture
def telemetry(run: RunDir, manifest: RunManifest) -> Iterator[Telemetry]:
    """Telemetry of `r1` without a heartbeat thread."""
    made = Telemetry(run, manifest)
    yield made
    made.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of small documents; its shards are made once, in its folder."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    write_texts(path)
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The documents of `text`."""
    return write_texts(tmp_path_factory.mktemp("texts") / "text.jsonl")
