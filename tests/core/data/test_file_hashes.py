"""Large source files are hashed once, until their size or change time differs."""

import hashlib
import os

import pytest

from nsa_core.data import file_hashes
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.progress import ignore_progress


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(file_hashes, "MIN_REMEMBERED_BYTES", 4)
    path = tmp_path / "large.bin"
    path.write_bytes(b"12345")
    return path


def test_a_large_file_is_read_once_and_again_when_it_changes(large, tmp_path):
    reports = []
    memory = tmp_path / "memory.json"
    first = FileHashes(memory, reports.append)(large)
    assert first == hashlib.sha256(b"12345").hexdigest()
    assert FileHashes(memory, reports.append)(large) == first
    assert len(reports) == 1
    large.write_bytes(b"54321")
    os.utime(large, ns=(1, 1))
    assert FileHashes(memory, reports.append)(large) == hashlib.sha256(b"54321").hexdigest()
    assert len(reports) == 2


def test_small_files_are_not_remembered(tmp_path):
    (tmp_path / "small").write_bytes(b"x")
    FileHashes(tmp_path / "memory.json", ignore_progress)(tmp_path / "small")
    assert not (tmp_path / "memory.json").exists()


def test_a_damaged_memory_only_costs_time(large, tmp_path):
    (tmp_path / "memory.json").write_text("{torn")
    found = FileHashes(tmp_path / "memory.json", ignore_progress)(large)
    assert found == hashlib.sha256(b"12345").hexdigest()
