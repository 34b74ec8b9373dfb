"""A run directory as a launch leaves it."""

from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest


def begin(run, attempt: int = 1) -> None:
    """Write the manifest of an attempt."""
    manifest = RunManifest(
        run_id=run.run_id, attempt=attempt, config=RunConfig(), config_sha256="0" * 64,
        created_unix_s=1.0,
    )  # fmt: skip
    write_manifest(run, manifest)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run-1")
    run.root.mkdir()
    begin(run)
    return run
