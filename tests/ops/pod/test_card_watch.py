"""The cards of a running attempt: what changes is found, what hangs is named and not waited for."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_ops.gpu.kernel_log import parse_kernel_log
from nsa_ops.gpu.smi_records import parse_csv
from nsa_ops.pod.card_watch import (
    CardEvidence,
    CardWatch,
    NewXid,
    Reading,
    compare,
    read_card_evidence,
)
from tests.ops.pod.health import beats, found, judged

HEADER = "index, uuid, pci.bus_id, ecc.errors.uncorrected.volatile.total\n"
TWO = HEADER + "0, GPU-a, 00000000:1A:00.0, 0\n1, GPU-b, 00000000:1B:00.0, 3\n"
XID = "[ 1.0] NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=1, name=python, words\n"


def reading(smi=TWO, log="", problem: str = "") -> Reading:
    events = [event for event in parse_kernel_log(log).events if event.kind == "xid"]
    return Reading(parse_csv(smi), tuple(events), problem)


def changed(before, now) -> CardEvidence:
    return compare(before, now, attempt=1, at_unix_s=1.0)


def test_what_was_there_before_the_attempt_is_not_new() -> None:
    log = XID.format(bus="1a", code=79)
    seen = changed(reading(log=log), reading(log=log))
    assert (seen.num_cards, seen.xids, seen.ecc, seen.lost) == (2, [], {}, [])


def test_new_errors_of_our_cards_count_and_those_of_others_do_not() -> None:
    old = XID.format(bus="1a", code=13)
    new = old + old + XID.format(bus="1b", code=48) + XID.format(bus="ff", code=79)
    seen = changed(reading(log=old), reading(log=new))
    assert [(one.code, one.count) for one in seen.xids] == [(13, 1), (48, 1)]


def test_memory_errors_are_counted_from_the_first_look() -> None:
    grown = TWO.replace("1B:00.0, 3", "1B:00.0, 5")
    assert changed(reading(), reading(grown)).ecc == {"gpu1": 2}


@pytest.mark.parametrize(
    "now",
    [
        TWO.rsplit("1, GPU-b", 1)[0],
        "Unable to determine the device handle for GPU 0000:1B:00.0: GPU is lost.\n",
        TWO.replace("1, GPU-b, 00000000:1B:00.0, 3", "1, GPU-b, 00000000:1B:00.0, [GPU is lost]"),
    ],
)
def test_a_card_that_is_gone_or_says_so_is_lost(now) -> None:
    assert "gpu1" in changed(reading(), reading(now)).lost


def test_a_tool_without_an_answer_loses_no_card() -> None:
    seen = changed(reading(), reading("", problem="it hangs"))
    assert (seen.lost, seen.problem) == ([], "it hangs")


def xid(code: int) -> NewXid:
    return NewXid(code=code, bus="0000:1a:00", count=1, text="")


@pytest.mark.parametrize(
    ("seen", "rule", "level"),
    [
        ({"lost": ["gpu1"]}, "card_lost", "halt"),
        ({"ecc": {"gpu0": 2}}, "card_ecc", "halt"),
        ({"xids": [xid(79)]}, "card_xid", "halt"),
        ({"xids": [xid(31)]}, "card_xid", "warn"),
        (
            {"xids": [NewXid(code=c, bus="", count=1, text="") for c in (13, 48)]},
            "card_xid",
            "halt",
        ),
        ({"problem": "nvidia-smi did not answer within 10 s"}, "card_unread", "warn"),
    ],
)
def test_the_rules_halt_for_a_broken_card_and_warn_for_the_rest(
    seen, rule: str, level: str
) -> None:
    evidence = CardEvidence(attempt=1, at=1.0, num_cards=2, **seen)
    assert found(judged(beats(5), cards=evidence)) == {rule: level}


def test_a_card_that_does_nothing_new_is_no_finding() -> None:
    assert judged(beats(5), cards=CardEvidence(attempt=1, at=1.0, num_cards=2)).level == "healthy"
    assert judged(beats(5), cards=None).level == "healthy"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """nvidia-smi and dmesg that print a file, or do what a script says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("nvidia-smi", "dmesg"):
        (folder / name).write_text(f'#!/bin/sh\nexec cat "{folder}/{name}.out"\n')
        (folder / name).chmod(0o755)
    (folder / "nvidia-smi.out").write_text(TWO)
    (folder / "dmesg.out").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    root = tmp_path / "runs" / "r1"
    root.mkdir(parents=True)
    return RunDir(root)


def test_a_watch_sees_a_new_xid_and_leaves_it_for_the_probe(run: RunDir, tools: Path) -> None:
    watch = CardWatch(run, 2, every_s=1e-9)
    assert watch.look().xids == []
    (tools / "dmesg.out").write_text(XID.format(bus="1a", code=79))
    assert [one.code for one in watch.look().xids] == [79]
    assert [one.code for one in read_card_evidence(run, 2).xids] == [79]
    assert read_card_evidence(run, 3) is None
    assert json.loads(run.cards.read_text())["num_cards"] == 2


def test_a_tool_that_hangs_is_named_and_asked_again_only_when_it_has_ended(
    run: RunDir, tools: Path
) -> None:
    watch = CardWatch(run, 1, every_s=1e-9)
    watch.look()
    watch._smi.timeout_s = 0.3
    (tools / "nvidia-smi").write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    began_s = time.monotonic()
    assert "did not answer within 0.3 s" in watch.look().problem
    assert time.monotonic() - began_s < 10
    (tools / "nvidia-smi").write_text(f'#!/bin/sh\nexec cat "{tools}/nvidia-smi.out"\n')
    end = time.monotonic() + 10
    while watch.look().problem and time.monotonic() < end:
        time.sleep(0.05)
    assert watch.look().problem == ""


def test_a_kernel_log_that_may_not_be_read_is_recorded(run: RunDir, tools: Path) -> None:
    (tools / "dmesg").write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    assert "Operation not permitted" in CardWatch(run, 1, every_s=1e-9).look().kernel_log_problem


def test_a_machine_without_cards_is_not_asked(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert CardWatch(run, 1, every_s=1e-9).look() is None
    assert not run.cards.exists()
