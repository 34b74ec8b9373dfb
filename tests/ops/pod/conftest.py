"""A run directory as a launch leaves it."""

from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, RunManifest, write_manifest


def begin(run, attempt: int = 1) -> None:
    """Write the manifest of an attempt."""
    manifest = RunManifest(
        run_id=run.run_id, attempt=attempt, config=RunConfig(), config_sha256="0" * 64,
        created_unix_s=1.0,
    )  # fmt: skip
    write_manifest(run, manifest)


def begin_ranks(run: RunDir, num_ranks: int, *, pods: int = 1, node: int = 0) -> RunManifest:
    """Write the manifest of a run with several ranks a pod, on the pod `node`."""
    config = RunConfig.model_validate(
        {
            "batch": {"accumulation": num_ranks * pods},
            "runtime": {"device": "cpu", "cpu_ranks": num_ranks, "num_pods": pods},
        }
    )
    manifest = RunManifest(
        run_id=run.run_id, config=config, config_sha256="0" * 64, created_unix_s=1.0,
        node=Node(rank=node, address="10.0.0.1", port=29_500) if pods > 1 else Node(),
    )  # fmt: skip
    write_manifest(run, manifest)
    return manifest


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run-1")
    run.root.mkdir()
    begin(run)
    return run
