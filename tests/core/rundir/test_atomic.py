"""Files are written whole, lines are appended whole, and obstacles are moved aside."""

import os

import pytest

from nsa_core.rundir import atomic
from nsa_core.rundir.atomic import clear_obstacles
from nsa_core.rundir.bounded_json import read_last_records, read_records
from nsa_core.rundir.events import Event, read_events, record
from nsa_core.rundir.layout import RunDir


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    atomic.write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_file_that_cannot_be_begun_is_named_and_not_the_temporary_one(tmp_path):
    asked = tmp_path / "absent" / "result.json"
    with pytest.raises(FileNotFoundError) as caught:
        atomic.write_text(asked, "{}")
    assert caught.value.filename == str(asked)


def test_an_append_after_a_torn_line_starts_on_its_own_line(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"whole": 1}\n{"to')
    atomic.append_line(path, '{"next": 2}')
    assert path.read_bytes() == b'{"whole": 1}\n{"to\n{"next": 2}\n'


def test_events_around_a_torn_line_are_all_read_and_the_torn_one_is_counted(tmp_path):
    run = RunDir(tmp_path)
    record(run, kind="launched", by="operator", attempt=1)
    with run.events.open("ab") as file:
        file.write(b'{"ts": 1, "ki')
    record(run, kind="ended", by="trainer", attempt=1, facts={"step": 3})
    assert [event.kind for event in read_events(run)] == ["launched", "ended"]
    assert read_records(run.events, Event).torn == 1


def test_reading_by_offset_loses_nothing_and_repeats_nothing(tmp_path):
    run = RunDir(tmp_path)
    seen, offset = [], 0
    for step in range(20):
        record(run, kind="saved", by="trainer", attempt=1, facts={"step": step})
        if step % 3 == 0:
            found = read_records(run.events, Event, offset)
            seen += [event.facts["step"] for event in found.records]
            offset = found.offset
    content = run.events.read_bytes()
    run.events.write_bytes(content + b'{"half": ')
    found = read_records(run.events, Event, offset)
    seen += [event.facts["step"] for event in found.records]
    assert seen == list(range(20))
    assert found.offset == len(content)


def test_the_last_records_of_a_large_file_are_read_without_reading_it_all(tmp_path):
    run = RunDir(tmp_path)
    for step in range(200):
        record(run, kind="saved", by="trainer", attempt=1, facts={"step": step})
    size = run.events.stat().st_size
    found = read_last_records(run.events, Event, max_bytes=1000)
    assert found.torn == 0
    assert 0 < len(found.records) < 10
    assert found.records[-1].facts["step"] == 199
    assert found.offset == size


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
