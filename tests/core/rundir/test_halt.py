import os

import pytest

from nsa_core.rundir.halt import HaltRequest, describe_halt_file, read_halt, write_halt
from nsa_core.rundir.layout import RunDir, check_run_id


def read(run, begun=100, *, has_appeared=False):
    """What `.HALT` asks of an attempt whose manifest was written at this time."""
    run.manifest.write_text("{}")
    os.utime(run.manifest, (begun, begun))
    return read_halt(run, run_id="run-a", attempt=2, has_appeared=has_appeared)


def request(run_id="run-a", attempt=2):
    return HaltRequest(run_id=run_id, attempt=attempt, reason="enough", by="operator", at=1.0)


def test_a_request_for_this_run_and_attempt_counts_whatever_the_clock_says(tmp_path):
    run = RunDir(tmp_path)
    write_halt(run, request())
    assert read(run, begun=10**10) == request()


@pytest.mark.parametrize("stale", [request(attempt=1), request(run_id="run-b")])
def test_a_request_for_another_attempt_or_run_is_stale(tmp_path, stale):
    run = RunDir(tmp_path)
    write_halt(run, stale)
    assert read(run) is None


def test_a_plain_line_counts_only_if_it_is_newer_than_the_start(tmp_path):
    run = RunDir(tmp_path)
    run.halt.write_text("halt: manual_stop\n")
    os.utime(run.halt, (150, 150))
    found = read(run, begun=100)
    assert found is not None
    assert (found.reason, found.by, found.attempt) == ("manual_stop", "file", 2)
    assert read(run, begun=200) is None
    assert read(run, begun=200, has_appeared=True) == found


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b'{"run_id": "run-a"}'])
def test_an_unreadable_halt_file_still_stops_a_run_it_is_newer_than(tmp_path, content):
    run = RunDir(tmp_path)
    run.halt.write_bytes(content)
    assert read(run, begun=0) is not None
    run.manifest.unlink()
    assert read_halt(run, run_id="run-a", attempt=2) is not None


def link_to_a_read_error(path):
    """The beginning of /proc/self/mem cannot be read: EIO."""
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, link_to_a_read_error])
def test_what_cannot_be_read_asks_nothing_and_is_named(tmp_path, make):
    run = RunDir(tmp_path)
    make(run.halt)
    assert read(run, begun=0) is None
    assert "cannot be read" in describe_halt_file(run)
    write_halt(run, request())
    assert read(run) == request()


@pytest.mark.parametrize("bad", ["", "../x", ".hidden", "a b", "a/b", "a\n", "-x", "x" * 81])
def test_a_run_id_that_cannot_be_a_folder_is_refused(bad):
    with pytest.raises(ValueError, match="run id"):
        check_run_id(bad)


def test_a_stale_request_is_described_in_words(tmp_path):
    run = RunDir(tmp_path)
    assert describe_halt_file(run) is None
    write_halt(run, HaltRequest(run_id="r1", attempt=2, reason="lunch", by="operator", at=1.0))
    assert describe_halt_file(run).startswith("operator asked r1 attempt 2: lunch (written ")
    run.halt.write_text("halt: by hand\n")
    assert describe_halt_file(run).startswith("halt: by hand (written ")
