import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsa_ops.errors import LocalResourceError, NotFoundError, OpsError
from nsa_ops.remote.audit import (
    AuditedTransport,
    AuditLog,
    Chain,
    Head,
    first_broken_line,
    read_chain,
)
from nsa_ops.remote.transport import Completed
from tests.ops.fakes import FakeTransport, completed


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "audit.jsonl")


class InMemory:
    """A head that is kept apart, as the registry keeps it."""

    def __init__(self) -> None:
        self.head: Head | None = None

    def read(self) -> Head | None:
        return self.head

    def write(self, head: Head) -> None:
        self.head = head


def lines_of(log: AuditLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_every_call_has_its_beginning_and_its_end_with_its_sizes(log: AuditLog) -> None:
    audited = AuditedTransport(FakeTransport({"echo": completed("12345", exit_code=3)}), log, "p")
    audited.run(["echo", "x"], stdin=b"secret", timeout_s=1)
    begin, end = lines_of(log)
    assert (begin["pod"], begin["argv"], begin["stdin_bytes"]) == ("p", ["echo", "x"], 6)
    assert begin["begun_by"]["pid"] == os.getpid()
    assert (end["pod"], end["id"], end["exit_code"]) == ("p", begin["id"], 3)
    assert end["stdout_bytes"] == 5
    assert "secret" not in log.path.read_text()


def test_calls_that_fail_are_recorded_too(log: AuditLog, tmp_path: Path) -> None:
    audited = AuditedTransport(FakeTransport(), log, "p")
    failing: list[Callable[[], object]] = [
        lambda: audited.run(["gone"], timeout_s=1),
        lambda: audited.put(tmp_path / "gone", "/there", timeout_s=1),
        lambda: audited.get("/gone", tmp_path / "here", timeout_s=1),
        lambda: audited.tail("/gone", 0, max_bytes=1, timeout_s=1),
        lambda: audited.stream("/gone", 0, print, max_bytes=1, timeout_s=1),
    ]
    for call in failing:
        with pytest.raises((OpsError, OSError, KeyError)):
            call()
    ends = lines_of(log)[1::2]
    assert [end["call"] for end in ends] == ["run", "put", "get", "tail", "stream"]
    assert all("gone" in end["error"] for end in ends)


def test_ctrl_c_in_a_call_is_its_end(log: AuditLog) -> None:
    class Interrupted(FakeTransport):
        def run(
            self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, max_bytes: int = 0
        ) -> Completed:
            stop = KeyboardInterrupt()
            stop.add_note("ended there")
            raise stop

    with pytest.raises(KeyboardInterrupt):
        AuditedTransport(Interrupted(), log, "p").run(["probe"], timeout_s=1)
    assert lines_of(log)[1]["error"] == "interrupted by Ctrl-C; ended there"
    assert first_broken_line(log.path) is None


def test_nothing_is_done_that_could_not_be_recorded_before(tmp_path: Path) -> None:
    transport = FakeTransport({"echo": completed()})
    (tmp_path / "file").touch()
    log = AuditLog(tmp_path / "file" / "audit.jsonl")
    with pytest.raises(LocalResourceError, match="cannot be written"):
        AuditedTransport(transport, log, "p").run(["echo"], timeout_s=1)
    assert transport.asked == []


def test_what_cannot_be_recorded_is_told_and_done_where_that_was_agreed(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").touch()
    log = AuditLog(tmp_path / "file" / "audit.jsonl", unrecorded=told.append)
    transport = FakeTransport({"echo": completed("x")})
    assert AuditedTransport(transport, log, "p").run(["echo"], timeout_s=1).stdout == b"x"
    assert "cannot be written" in told[0]


@pytest.mark.parametrize("length", [10, 65_535, 65_536, 65_537, 3_000_000])
def test_a_line_of_any_length_keeps_the_chain(log: AuditLog, length: int) -> None:
    for log_ in (log, AuditLog(log.path, InMemory())):
        log_.append({"text": "x" * length})
        log_.append({"number": 1})
    assert first_broken_line(log.path) is None
    assert len(lines_of(log)) == 4


def test_words_that_are_no_text_keep_the_chain(log: AuditLog) -> None:
    transport = FakeTransport({"rm": completed()})
    AuditedTransport(transport, log, "p").run(["rm", "a\udcff", "x\udc80" * 2000], timeout_s=1)
    assert first_broken_line(log.path) is None


@pytest.fixture
def known(log: AuditLog) -> AuditLog:
    """A log of five lines whose head is kept apart."""
    known = AuditLog(log.path, InMemory())
    for number in range(5):
        known.append({"number": number})
    return known


def state_of(log: AuditLog) -> Chain:
    assert log.head is not None
    return read_chain(log.path, log.head.read())


@pytest.mark.parametrize("num_left", [4, 1, 0])
def test_a_log_whose_end_was_cut_off_is_not_whole_before_and_after_the_next_line(
    known: AuditLog, num_left: int
) -> None:
    lines = known.path.read_text().splitlines(keepends=True)
    known.path.write_text("".join(lines[:num_left]))
    assert first_broken_line(known.path) is None, "the chain alone cannot tell"
    assert state_of(known).missing == f"its end: 5 lines written, and {num_left} there"
    known.append({"number": 5})
    assert state_of(known).broken_line == num_left + 1


def test_a_log_that_was_deleted_is_not_whole_before_and_after_the_next_line(
    known: AuditLog,
) -> None:
    known.path.unlink()
    assert state_of(known) == Chain(0, None, "all that was written, 5 lines")
    known.append({"number": 5})
    known.append({"number": 6})
    assert state_of(known).broken_line == 1


def test_another_log_with_a_chain_of_its_own_is_not_the_log(
    known: AuditLog, tmp_path: Path
) -> None:
    other = AuditLog(tmp_path / "other.jsonl")
    for number in range(7):
        other.append({"other": number})
    other.path.replace(known.path)
    assert state_of(known) == Chain(7, None, "line 5 as it was written")
    known.append({"number": 5})
    assert state_of(known).broken_line == 8


def test_a_line_that_was_cut_in_two_is_the_only_one_that_is_broken(known: AuditLog) -> None:
    known.path.write_bytes(known.path.read_bytes() + b'{"torn": tr')
    known.append({"number": 5})
    assert state_of(known) == Chain(7, 6)
    lines = known.path.read_text().splitlines()
    assert json.loads(lines[6])["previous"] == json.loads(lines[4])["sha256"]


#: As d1291d8 wrote it: one line a call, no head; the hash is of the sorted keys.
OLD = (
    '{"at": 1795800000.0, "pod": "a", "call": "run", "seconds": 0.1, "argv": ["echo", "é"], '
    '"stdin_bytes": 0, "exit_code": 0, "stdout_bytes": 1, "stderr_bytes": 0, "previous": "'
    + "0" * 64 + '"'
)  # fmt: skip


def test_a_log_of_an_earlier_version_goes_on(log: AuditLog) -> None:
    entry = json.loads(OLD + "}")
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
    log.path.write_text(f'{OLD}, "sha256": "{digest}"}}\n')
    known = AuditLog(log.path, InMemory())
    known.append({"number": 1})
    assert state_of(known) == Chain(2, None)
    log.append({"number": 2})  # the earlier version again, which knows no head
    known.append({"number": 3})
    assert state_of(known) == Chain(4, None)
    assert known.head is not None
    assert known.head.read() == Head(4, log.path.stat().st_size, lines_of(log)[3]["sha256"])


def test_a_line_that_the_disk_takes_in_part_is_taken_back(
    known: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = known.path.read_bytes()
    write = os.write

    def full_after(descriptor: int, content: bytes) -> int:
        if len(content) < 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[:500])

    monkeypatch.setattr(os, "write", full_after)
    with pytest.raises(LocalResourceError, match="No space left on device"):
        known.append({"text": "x" * 1200})
    monkeypatch.undo()
    assert known.path.read_bytes() == before
    known.append({"number": 5})
    assert state_of(known) == Chain(6, None)


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
