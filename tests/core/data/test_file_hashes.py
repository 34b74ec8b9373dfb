"""Files are hashed once, until their size, change time or inode differs."""

import hashlib
import os
import time
from pathlib import Path
from typing import Never

import pytest

from nsa_core.data import file_hashes
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.reporting import ignore_progress


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch):
    """Paths that were really read."""
    read = []
    real = file_hashes.hash_watched

    def hash_file(path, *more):
        read.append(path.name)
        return real(path, *more)

    monkeypatch.setattr(file_hashes, "hash_watched", hash_file)
    return read


def settled(path, content):
    """A file that was written a minute ago."""
    path.write_bytes(content)
    then_ns = time.time_ns() - 60 * 10**9
    os.utime(path, ns=(then_ns, then_ns))
    return path


def remembered(memory, path):
    hashes = FileHashes(memory)
    found = hashes(path)
    hashes.save()
    return found


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path, hashed) -> None:
    memory, path = tmp_path / "memory.json", settled(tmp_path / "a", b"12345")
    first = remembered(memory, path)
    assert first == hashlib.sha256(b"12345").hexdigest()
    assert remembered(memory, path) == first
    assert hashed == ["a"]
    os.utime(path, ns=(1, 1))
    assert remembered(memory, path) == first
    assert hashed == ["a", "a"]
    beside = settled(tmp_path / "b", b"54321")
    os.utime(beside, ns=(1, 1))
    beside.replace(path)  # same size and time, another inode
    assert remembered(memory, path) == hashlib.sha256(b"54321").hexdigest()
    assert FileHashes(memory, is_forgetful=True).recall(path) is None


def test_a_file_that_was_written_just_now_is_not_remembered(tmp_path: Path, hashed) -> None:
    """Its change time may not move when it is written again in the same moment."""
    path = tmp_path / "a"
    path.write_bytes(b"x")
    for _ in range(2):
        remembered(tmp_path / "memory.json", path)
    assert hashed == ["a", "a"]


def test_many_files_are_hashed_in_their_order_and_each_once(tmp_path: Path, hashed) -> None:
    paths = [settled(tmp_path / f"{n}", b"%d" % n) for n in range(30)]
    expected = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(30)]
    for _ in range(2):
        hashes = FileHashes(tmp_path / "memory.json")
        assert list(hashes.all_of(paths)) == expected
        hashes.save()
    assert len(hashed) == 30
    with pytest.raises(FileNotFoundError):
        list(FileHashes(tmp_path / "memory.json").all_of([*paths, tmp_path / "gone"]))


def test_a_stop_ends_the_threads_that_hash(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    os.mkfifo(path)  # a read of it waits for its writer, as one of a dead disk waits for its answer

    class Stop(Exception):
        pass

    def stop(_) -> Never:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        os.write(descriptor, b"x")
        os.close(descriptor)
        raise Stop

    with pytest.raises(Stop):
        list(FileHashes(tmp_path / "memory.json", stop).all_of([path]))


def test_a_damaged_memory_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_text('{"files": {"/a": {"num_bytes": 1}}}')  # an older form
    path = settled(tmp_path / "a", b"12345")
    found = FileHashes(tmp_path / "memory.json", ignore_progress)(path)
    assert found == hashlib.sha256(b"12345").hexdigest()


def test_a_memory_that_cannot_be_read_is_none(tmp_path: Path, hashed) -> None:
    path = settled(tmp_path / "a", b"one")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for memory in ("pipe", "folder"):
        FileHashes(tmp_path / memory)(path)
    assert hashed == ["a", "a"]
