"""What a pod reads of the heartbeats of all its ranks, and what a hostile one changes: a flag."""

import json
import os
import time
from pathlib import Path

import pytest

from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import write_manifest
from nsa_core.rundir.process import identify
from nsa_ops.pod.probe import probe
from nsa_ops.pod.rank_files import RankFiles
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence, tracker_of
from tests.ops.pod.conftest import begin_ranks
from tests.ops.pod.ends import record_process
from tests.ops.pod.health import LIMITS

MIB = 2**20


def line_of(rank: int, step: int, **fields) -> str:
    given = {
        "run_id": "run-1", "attempt": 1, "rank": rank, "pid": 1, "ts": time.time(), "iso": "",
        "msg": "progress", "phase": "train", "alive_seq": step, "progress_seq": step, "step": step,
        "work_s": 0.5, "host_rss_mib": 900 + rank,
    }  # fmt: skip
    return json.dumps(given | ({"loss": 3.0} if rank == 0 else {}) | fields)


def write(run: RunDir, rank: int, *steps: int, **fields) -> None:
    for step in steps:
        append_line(run.heartbeat(rank), line_of(rank, step, **fields))


def look(run: RunDir):
    return probe(run.root.parent, ["run-1"], {}).runs[0]


def test_a_probe_shows_every_rank_of_its_pod(run: RunDir) -> None:
    begin_ranks(run, 4)
    for rank in range(4):
        write(run, rank, 1, 2, 3)
    report = look(run)
    assert [(one.rank, one.step, one.host_rss_mib) for one in report.ranks] == [
        (0, 3, 900), (1, 3, 901), (2, 3, 902), (3, 3, 903),
    ]  # fmt: skip
    assert (report.flags, report.verdict.level) == ([], "healthy")


def test_a_run_with_one_rank_has_no_ranks_and_reads_no_other_file(run: RunDir) -> None:
    write(run, 0, 1)
    os.mkfifo(run.heartbeat(1))
    report = look(run)
    assert (report.ranks, report.flags) == ((), [])


def test_the_second_pod_of_a_run_has_its_own_ranks_and_no_file_of_the_first(run: RunDir) -> None:
    begin_ranks(run, 2, pods=2, node=1)
    write(run, 2, 5, msg="beat")
    write(run, 3, 4, msg="beat")
    os.mkfifo(run.heartbeat(0))
    report = look(run)
    assert [(one.rank, one.step) for one in report.ranks] == [(2, 5), (3, 4)]
    assert (report.last_beat.rank, report.flags) == (2, [])


HOSTILE = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "unreadable": lambda path: path.symlink_to("/proc/self/mem"),
    "8 GiB of NUL": lambda path: (path.touch(), os.truncate(path, 8 * 2**30)),
    "binary": lambda path: path.write_bytes(os.urandom(300_000) + b"\n"),
    "binary without a newline": lambda path: path.write_bytes(b"\x00\xff\xfe" * 100),
    "of another run": lambda path: path.write_text(line_of(1, 9, run_id="run-2") + "\n"),
    "of other ranks": lambda path: path.write_text(f"{line_of(0, 9)}\n{line_of(7, 9)}\n"),
    "a step that is none": lambda path: path.write_text(line_of(1, 10**30) + "\n"),
    "a negative step": lambda path: path.write_text(line_of(1, -(10**30)) + "\n"),
    "nested": lambda path: path.write_text('{"a":' * 5000 + "1" + "}" * 5000 + "\n"),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_of_a_rank_changes_nothing_but_a_flag(run: RunDir, make) -> None:
    begin_ranks(run, 2)
    write(run, 0, 1, 2, 3)
    record_process(run, identify(os.getpid()))
    write(run, 1, 1, 2, 3)
    good = look(run)
    run.heartbeat(1).unlink()
    make(run.heartbeat(1))
    began_s = time.monotonic()
    bad = look(run)
    assert time.monotonic() - began_s < 2.0
    new = [flag for flag in bad.flags if flag not in good.flags]
    assert len(new) == 1
    assert new[0].startswith("heartbeat_rank1.jsonl ")
    assert bad.ranks[1].msg is None
    assert bad.ranks[1].problem == new[0]
    for name in ("state", "verdict", "figures", "last_beat"):
        seen, before = getattr(bad, name), getattr(good, name)
        if name == "figures":
            seen, before = seen.record, before.record
        assert seen == before, name
    old = ProcessEvidence(trainer_alive=True, age_s=9000.0)
    manifest = begin_ranks(run, 2)
    tracker = tracker_of(manifest, None)
    tracker.feed([good.last_beat])
    for lines in RankFiles(run, manifest).read():
        tracker.feed_rank(lines.rank, lines.beats, lines.problem)
    evidence = tracker.evidence(time.time(), old, MachineEvidence())
    assert [one.problem != "" for one in evidence.ranks] == [False, True]
    assert judge(evidence, LIMITS).level == "healthy"


def test_following_loses_and_repeats_nothing_and_keeps_a_problem_until_a_line_is_good(
    run: RunDir,
) -> None:
    files = RankFiles(run, begin_ranks(run, 2))

    def steps() -> tuple[list[int], bool]:
        (lines,) = files.read()
        return [beat.step for beat in lines.beats], bool(lines.problem)

    assert steps() == ([], False)
    run.heartbeat(1).write_text("torn\n")
    assert steps() == ([], True)
    assert steps() == ([], True)
    write(run, 1, 1, 2)
    assert steps() == ([1, 2], False)
    with run.heartbeat(1).open("a") as file:
        file.write(line_of(1, 3)[:40])
    assert steps() == ([], False)


def test_the_past_of_many_ranks_together_is_bounded(run: RunDir) -> None:
    manifest = begin_ranks(run, 64)
    line = line_of(0, 1) + " " * 700
    for rank in range(64):
        text = line.replace('"rank": 0', f'"rank": {rank}') + "\n"
        run.heartbeat(rank).write_text(text * 200)
    num_read = sum(len(lines.beats) for lines in RankFiles(run, manifest).read())
    assert MIB < num_read * len(line) <= 2 * MIB
    assert len(look(run).ranks) == 64


def test_a_beat_of_an_earlier_attempt_is_no_sign_of_life(run: RunDir) -> None:
    manifest = begin_ranks(run, 2).model_copy(update={"attempt": 2})
    write_manifest(run, manifest)
    write(run, 0, 1, attempt=2)
    write(run, 1, 1, attempt=1)
    one = look(run).ranks[1]
    assert (one.msg, one.problem) == (None, "")
