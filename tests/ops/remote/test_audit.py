import json
import threading
from pathlib import Path

import pytest

from nsa_ops.errors import NotFoundError
from nsa_ops.remote.audit import AuditedTransport, AuditLog, first_broken_line
from tests.ops.fakes import FakeTransport, completed


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "audit.jsonl")


def test_every_call_is_a_line_with_its_sizes(log: AuditLog) -> None:
    audited = AuditedTransport(FakeTransport({"echo": completed("12345", exit_code=3)}), log, "p")
    audited.run(["echo", "x"], stdin=b"secret", timeout_s=1)
    entry = json.loads(log.path.read_text())
    assert (entry["pod"], entry["argv"], entry["exit_code"]) == ("p", ["echo", "x"], 3)
    assert (entry["stdin_bytes"], entry["stdout_bytes"]) == (6, 5)
    assert "secret" not in log.path.read_text()


def test_a_call_that_fails_is_recorded_too(log: AuditLog) -> None:
    audited = AuditedTransport(FakeTransport(), log, "p")
    with pytest.raises(NotFoundError):
        audited.run(["gone"], timeout_s=1)
    assert "does not exist" in json.loads(log.path.read_text())["error"]


def test_a_changed_or_removed_line_breaks_the_chain(log: AuditLog) -> None:
    for number in range(5):
        log.append({"number": number})
    assert first_broken_line(log.path) is None
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join(lines[:2] + lines[3:]))
    assert first_broken_line(log.path) == 3
    log.path.write_text("".join(lines).replace('"number": 1', '"number": 7'))
    assert first_broken_line(log.path) == 2


def test_two_writers_at_once_keep_one_chain(log: AuditLog) -> None:
    def write() -> None:
        for number in range(50):
            AuditLog(log.path).append({"number": number})

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(log.path.read_text().splitlines()) == 200
    assert first_broken_line(log.path) is None


def test_a_secret_in_a_word_or_an_error_is_not_in_the_log_and_not_told(log: AuditLog) -> None:
    told: list[str] = []
    transport = FakeTransport({"bench": completed()})
    audited = AuditedTransport(transport, log, "p", told.append)
    audited.run(["bench", "--set", "data.url=https://me:c4n4ry@host"], timeout_s=1)
    with pytest.raises(NotFoundError):
        audited.run(["password=c4n4ry"], timeout_s=1)
    long_script = "token=c4n4ry0" + "x" * 3000
    audited.run(["bench", long_script], timeout_s=1)
    assert "c4n4ry" not in log.path.read_text() + "".join(told)
    assert log.path.read_text().count("[redacted]") == 4
    assert first_broken_line(log.path) is None
