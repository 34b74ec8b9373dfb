"""What the tests that start a trainer share: staged text, and one run that nothing disturbed."""

from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from tests.integration import trainer_runs


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all trainers keep their staged text, so that only the first one makes it."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> RunDir:
    """A run of 24 steps from beginning to end."""
    run = trainer_runs.make_run(tmp_path_factory.mktemp("undisturbed"), shards, "whole")
    assert trainer_runs.start_from_shell(run) == 0, run.log.read_text()
    return run
