"""`audit`: what was done on the pods, found again, and a broken chain named by its line."""

import json
from pathlib import Path

import pytest

from nsa_ops.errors import NotFoundError
from nsa_ops.remote.audit import CALLS, AuditedTransport, AuditLog
from nsa_ops.runs.audit_log import AuditQuery, read_audit, refusal_of
from tests.ops.cli_case import CommandLine
from tests.ops.fakes import FakeTransport, completed


@pytest.fixture
def log(own_settings: Path) -> AuditLog:
    log = AuditLog(own_settings / "state" / "audit.jsonl")
    transport = FakeTransport({"good": completed("x"), "bad": completed(exit_code=3)})
    for pod in ("a", "b"):
        audited = AuditedTransport(transport, log, pod)
        audited.run(["good", "two words"], timeout_s=1)
        audited.run(["bad"], timeout_s=1)
        with pytest.raises(NotFoundError):
            audited.run(["missing"], timeout_s=1)
        transport.files["/f"] = b"123"
        audited.tail("/f", 0, max_bytes=2, timeout_s=1)
    return log


@pytest.mark.parametrize(
    ("query", "lines"),
    [
        (AuditQuery(), [1, 2, 3, 4, 5, 6, 7, 8]),
        (AuditQuery(pod="b"), [5, 6, 7, 8]),
        (AuditQuery(call="tail"), [4, 8]),
        (AuditQuery(failed_only=True, pod="a"), [2, 3]),
        (AuditQuery(text="two words"), [1, 5]),
        (AuditQuery(last=3), [6, 7, 8]),
        (AuditQuery(text="two words", last=1), [5]),
    ],
)
def test_entries_are_found_by_pod_call_text_and_failure(
    log: AuditLog, query: AuditQuery, lines: list[int]
) -> None:
    view = read_audit(log.path, query)
    assert [entry.line for entry in view.entries] == lines
    assert (view.num_lines, view.broken_line) == (8, None)
    assert refusal_of(view) is None


def test_an_entry_says_what_was_done_and_how_it_ended(log: AuditLog) -> None:
    what = [(one.what, one.outcome) for one in read_audit(log.path, AuditQuery(pod="a")).entries]
    assert what == [
        ("good 'two words'", "exit 0"),
        ("bad", "exit 3"),
        ("missing", "error: `missing` does not exist on a fake pod"),
        ("/f", "2 bytes"),
    ]


@pytest.mark.parametrize(
    ("call", "hint"), [("tial", "Did you mean `tail`?"), ("nosuch", "Known: run, put, get")]
)
@pytest.mark.usefixtures("log")
def test_a_call_that_does_not_exist_is_usage_and_names_the_nearest(
    cli: CommandLine, call: str, hint: str
) -> None:
    said = cli("audit", "--call", call)
    assert (said.exit_code, said.out) == (2, "")
    assert said.err.startswith(f"error: `--call {call}` is no call that is logged\n")
    assert hint in said.err


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("log")
def test_a_call_without_entries_is_no_error(cli: CommandLine, call: str) -> None:
    said = cli("audit", "--call", call)
    assert (said.exit_code, "of 8 entries" in said.out) == (0, True)
    assert call in cli("audit", "--help").out


@pytest.mark.usefixtures("log")
def test_a_pod_that_nobody_knows_is_not_found_and_a_quiet_or_forgotten_one_is(
    cli: CommandLine, own_settings: Path
) -> None:
    said = cli("audit", "--pod", "c")
    assert (said.exit_code, said.out) == (6, "")
    assert "There is no pod `c`" in said.err
    assert cli("pod", "add", "c", f"local:{own_settings / 'pod'}").exit_code == 0
    assert cli("audit", "--pod", "c").exit_code == 0
    forgotten = cli("audit", "--pod", "a", "--text", "never done")
    assert (forgotten.exit_code, "0 of" in forgotten.out) == (0, True)


def test_runs_of_a_pod_that_nobody_knows_are_not_found(cli: CommandLine) -> None:
    said = cli("run", "ls", "--pod", "nope")
    assert (said.exit_code, said.out) == (6, "")
    assert "There is no pod `nope`" in said.err


def test_a_log_that_is_not_there_is_empty(cli: CommandLine) -> None:
    said = cli("audit")
    assert (said.exit_code, "no command was run on a pod yet" in said.out) == (0, True)


def test_a_broken_line_ends_with_9_and_its_number(log: AuditLog, cli: CommandLine) -> None:
    assert "the chain of hashes is whole" in cli("audit", "--last", "2").out
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join([*lines[:4], lines[4].replace('"b"', '"a"'), *lines[5:]]))
    said = cli("audit", "--json")
    assert said.exit_code == 9
    assert "Line 5 of" in said.err
    assert json.loads(said.out)["data"]["broken_line"] == 5
    log.path.write_text("".join(lines[:3]) + "not json\n" + "".join(lines[4:]))
    assert "Line 4 of" in cli("audit").err
