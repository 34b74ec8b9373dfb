import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_core.checks import host_speed
from nsa_core.checks.card_speed import AllReduceError, measure_all_reduce
from nsa_core.checks.host_speed import measure_disk, read_first_batch, try_debugger
from nsa_core.checks.machine import measure_machine
from nsa_core.config.recipe import resolve
from nsa_core.config.run import RunConfig
from nsa_core.data.documents import Document, RecordOrigin, Tallies, take_text
from nsa_core.data.reporting import DataError
from nsa_core.rundir.report import MachineSpeed

CONFIG = resolve("tiny-cpu", "cpu").config


def test_the_program_prints_what_a_machine_without_a_card_gave(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsa_core.checks.machine", "--folder", tmp_path],
        input=CONFIG.model_dump_json(), capture_output=True, text=True, check=True,
        timeout=120,
    )  # fmt: skip
    found = MachineSpeed.model_validate_json(done.stdout)
    assert found.cards == []
    assert found.disk is not None
    assert found.first_batch is not None
    assert found.first_batch.num_characters > 0
    assert found.problems == {} or list(found.problems) == ["debugger"]
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    data = CONFIG.data.model_copy(update={"source": "fineweb_edu_local", "path": path})
    config = CONFIG.model_copy(update={"data": data})
    found = measure_machine(config, tmp_path / "missing")
    assert {"disk", "first_batch"} <= set(found.problems)
    assert "nowhere" in found.problems["first_batch"]


def test_the_disk_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, size_mib=16)
    assert found.written_mib == 16
    assert found.seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        measure_disk(tmp_path / "missing")


def test_the_debugger_is_tried_on_a_process_that_is_no_child_of_it() -> None:
    said = try_debugger()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0":
        assert said == "" or "not permitted" in said or "denied" in said
    else:
        assert "not permitted" in said


class _Source:
    def __init__(self, documents: list[str], wait: threading.Event | None = None) -> None:
        self.texts, self.wait = documents, wait
        self.tallies = Tallies()

    def documents(self, _start: object) -> Iterator[Document]:
        if self.wait is not None:
            self.wait.wait()
        for number, text in enumerate(self.texts):
            yield from take_text(text, RecordOrigin("text", number), self.tallies)


def test_no_more_documents_are_read_than_a_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _Source(["abc"] * 1000)
    monkeypatch.setattr(host_speed, "make_source", lambda *_: source)
    found = read_first_batch(CONFIG)
    assert found.num_documents == CONFIG.data.document_batch
    assert found.num_characters == 3 * CONFIG.data.document_batch


def test_an_empty_source_and_one_that_hangs_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_speed, "make_source", lambda *_: _Source([]))
    with pytest.raises(DataError, match="holds no text"):
        read_first_batch(CONFIG)
    wait = threading.Event()
    monkeypatch.setattr(host_speed, "make_source", lambda *_: _Source(["a"], wait))
    with pytest.raises(DataError, match="came within"):
        read_first_batch(CONFIG, deadline_s=0.05)
    wait.set()


def test_a_local_data_set_is_read_on_for_what_a_staging_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 900 + "bad\n" * 100 + '{"text": "good"}\n' * 900)
    data = {"source": "fineweb_edu_local", "path": str(path)}
    config = RunConfig.model_validate({"data": data})
    found = read_first_batch(config)
    assert (found.num_documents, found.is_everything) == (64, True)
    assert found.account is not None
    assert found.account.num_lost == 100
    assert found.excess.startswith("5.26 % of the documents would be dropped")
    monkeypatch.setattr(host_speed, "LOOK_S", 0.0)
    found = read_first_batch(config)
    assert (found.is_everything, found.excess) == (False, "")


def test_a_local_data_set_without_documents_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two files is lost whole; the rest is not known where the look ends."""
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n' * 3000)
    data = {"source": "fineweb_edu_local", "path": str(tmp_path)}
    config = RunConfig.model_validate({"data": data})
    monkeypatch.setattr(host_speed, "LOOK_S", 0.0)
    with pytest.raises(DataError, match=r"no key `text`: 1,000.*its records have `body`"):
        read_first_batch(config)
    (tmp_path / "0.jsonl").write_text('{"text": "good"}\n' * 3000)
    found = read_first_batch(config)
    assert (found.is_everything, found.excess) == (False, "")


@pytest.mark.slow
@pytest.mark.integration
def test_processes_sum_a_tensor_and_a_failing_one_is_named() -> None:
    found = measure_all_reduce(2, "gloo", size_mib=2)
    assert (found.num_gpus, found.size_mib) == (2, 2)
    assert found.bus_gb_s > 0
    with pytest.raises(AllReduceError):
        measure_all_reduce(2, "no-such-backend", size_mib=2)
