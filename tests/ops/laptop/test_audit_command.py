"""`audit`: what was done on the pods, found again, and a broken chain named by its line."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nsa_ops.errors import NotFoundError
from nsa_ops.laptop.audit_log import AuditEntry, AuditQuery, read_audit, refusal_of
from nsa_ops.remote.audit import CALLS, AuditedTransport, AuditLog
from nsa_ops.remote.transport import Completed
from nsa_ops.store.audit_head import AuditHead
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
        (AuditQuery(), [2, 4, 6, 8, 10, 12, 14, 16]),
        (AuditQuery(pod="b"), [10, 12, 14, 16]),
        (AuditQuery(call="tail"), [8, 16]),
        (AuditQuery(failed_only=True, pod="a"), [4, 6]),
        (AuditQuery(text="two words"), [2, 10]),
        (AuditQuery(last=3), [12, 14, 16]),
        (AuditQuery(text="two words", last=1), [10]),
    ],
)
def test_entries_are_found_by_pod_call_text_and_failure(
    log: AuditLog, query: AuditQuery, lines: list[int]
) -> None:
    view = read_audit(log.path, query)
    assert [entry.line for entry in view.entries] == lines
    assert (view.num_lines, view.num_entries, view.is_whole) == (16, 8, True)
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
    ("what", "command"),
    [
        ("env PYTHONPATH=/pod/code/1 python3 -m nsa_ops.pod.act", "python3 -m nsa_ops.pod.act"),
        ("env -u TMUX TERM=xterm tmux -L a ls", "tmux -L a ls"),
        ("env 'A=two words' ls", "env 'A=two words' ls"),
        ("env", "env"),
        ("ls env A=b c", "ls env A=b c"),
    ],
)
def test_the_table_leaves_the_environment_of_a_command_out(what: str, command: str) -> None:
    assert AuditEntry(1, 0.0, "a", "run", what, "exit 0", 0.1).command == command


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
    log.path.write_text("".join([*lines[:4], lines[4].replace('"a"', '"b"'), *lines[5:]]))
    said = cli("audit", "--json")
    assert said.exit_code == 9
    assert "Line 5 of" in said.err
    assert json.loads(said.out)["data"]["broken_line"] == 5
    for damaged in ("not json", '{"at": null, "seconds": [1]}', f'{{"at": {"9" * 400}}}'):
        log.path.write_text("".join([*lines[:3], damaged, "\n", *lines[4:]]))
        said = cli("audit")
        assert (said.exit_code, "Line 4 of" in said.err) == (9, True)


def test_a_log_whose_end_is_gone_ends_with_9_also_after_the_next_command(
    cli: CommandLine, own_settings: Path
) -> None:
    cli("pod", "add", "here", f"local:{own_settings / 'pod'}")
    log = AuditLog(
        own_settings / "state" / "audit.jsonl",
        AuditHead(own_settings / "state" / "registry.sqlite"),
    )
    audited = AuditedTransport(FakeTransport({"good": completed("x")}), log, "here")
    for _ in range(3):
        audited.run(["good"], timeout_s=1)
    assert cli("audit").exit_code == 0
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join(lines[:-2]))
    cut = cli("audit", "--json")
    assert (cut.exit_code, "its end: 6 lines written, and 4 there" in cut.err) == (9, True)
    log.path.unlink()
    gone = cli("audit")
    assert (gone.exit_code, "lacks all that was written, 6 lines" in gone.err) == (9, True)
    audited.run(["good"], timeout_s=1)
    assert "Line 1 of" in cli("audit").err
    assert cli("audit").exit_code == 9


def test_a_call_whose_command_was_killed_is_cut_off_and_one_at_work_is_under_way(
    cli: CommandLine, own_settings: Path
) -> None:
    path = own_settings / "state" / "audit.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from nsa_ops.remote.audit import *\n"
        "class Killed:\n"
        "    def run(self, *words, **flags): os.kill(os.getpid(), 9)\n"
        "AuditedTransport(Killed(), AuditLog(Path(sys.argv[1])), 'here').run(['p'], timeout_s=1)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert killed.returncode == -9

    class Looking(FakeTransport):
        def run(self, argv: Sequence[str], **_limits: Any) -> Completed:
            (first, second) = read_audit(path, AuditQuery()).entries
            assert first.outcome.startswith("cut off: process ")
            assert second.outcome == f"under way in process {os.getpid()}"
            return completed()

    AuditedTransport(Looking(), AuditLog(path), "here").run(["q"], timeout_s=1)
    said = cli("audit", "--failed")
    assert (said.exit_code, "interrupted, end unknown: 1" in said.out) == (0, True)
    assert "was killed" in said.out
