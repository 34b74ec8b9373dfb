"""What has the name of a file of a run and cannot be read as one is moved out of the way."""

import os

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.obstacles import clear_obstacles


def link_to_a_read_error(path):
    """The beginning of /proc/self/mem cannot be read: EIO."""
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkdir, "is a folder"),
        (os.mkfifo, "is no regular file"),
        (link_to_a_read_error, "cannot be read: Input/output error"),
    ],
)
def test_what_cannot_be_read_as_a_file_is_renamed_and_named(tmp_path, make, what):
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    files = [run.training_csv, run.known_good, run.exit, run.halt, run.events, run.heartbeat()]
    for path in files:
        make(path)
    (tmp_path / "training.csv.aside-1").write_text("an earlier one\n")
    run.goodput.write_text("{")
    lines = clear_obstacles(run)
    assert len(lines) == len(files)
    assert f"training.csv {what}: renamed to training.csv.aside-2" in lines
    assert not any(os.path.lexists(path) for path in files)
    assert run.goodput.read_text() == "{"
    assert clear_obstacles(run) == []


def test_a_file_where_a_folder_belongs_is_renamed(tmp_path):
    run = RunDir(tmp_path)
    run.checkpoints.write_text("")
    assert clear_obstacles(run) == ["checkpoints is no folder: renamed to checkpoints.aside-1"]
