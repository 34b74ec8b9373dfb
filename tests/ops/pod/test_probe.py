import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_core.rundir import events
from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.checkpoint import MANIFEST_NAME, CheckpointFile, CheckpointManifest
from nsa_core.rundir.data_account import DataAccount, FileAccount
from nsa_core.rundir.events import Event
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_ops.pod.journal import Journal
from nsa_ops.pod.messages import Offsets, ProbeDocument
from nsa_ops.pod.probe import MAX_BYTES, probe
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.pod.verify import verify_newest
from tests.ops.pod.conftest import begin


def write_beats(run, first, last, attempt: int = 1, at=None, **fields) -> None:
    for step in range(first, last + 1):
        beat = Heartbeat(
            run_id="run-1", attempt=attempt, rank=0, pid=1, ts=at or time.time(), iso="",
            msg="progress", phase="train", alive_seq=step, progress_seq=step, step=step,
            **({"loss": 3.0, "lr": 0.1, "grad_norm": 1.0} | fields),
        )  # fmt: skip
        append_line(run.heartbeat(), beat.model_dump_json())


def look(run, **offsets):
    document = probe(run.root.parent, ["run-1"], {"run-1": Offsets(**offsets)})
    return document.runs[0]


def test_a_run_that_was_only_prepared_is_planned_and_healthy(run: RunDir) -> None:
    report = look(run)
    assert (report.state, report.verdict.level, report.beats) == ("planned", "healthy", [])


def test_a_report_says_in_brief_what_was_dropped_of_the_data(run: RunDir) -> None:
    assert look(run).data is None
    files = tuple(FileAccount(file=f"{n}.jsonl", num_lost=1) for n in range(1000))
    account = DataAccount(num_documents=9, num_lost=1000, files=files, num_lossy_files=1000)
    run.data.mkdir()
    run.data_account.write_text(account.model_dump_json())
    brief = look(run).data
    assert len(brief.model_dump_json()) < 1000
    assert brief.sentence() == account.sentence()
    assert "and 997 more files" in brief.sentence()
    run.data_account.write_text("{torn")
    assert "account.json cannot be read" in look(run).data.sentence()


def test_following_by_offset_loses_and_repeats_nothing_even_with_a_torn_line(run: RunDir) -> None:
    write_beats(run, 1, 3)
    with run.heartbeat().open("ab") as file:
        file.write(b'{"schema_version": 1, "run_id": "ru')
    first = look(run, heartbeats=0)
    write_beats(run, 4, 5)
    second = look(run, heartbeats=first.beats_offset)
    third = look(run, heartbeats=second.beats_offset)
    assert [beat.step for beat in (*first.beats, *second.beats)] == [1, 2, 3, 4, 5]
    assert (second.beats_torn, third.beats) == (1, [])


def test_a_huge_file_is_carried_in_bounded_pieces_that_say_there_is_more(run: RunDir) -> None:
    write_beats(run, 1, 3000)
    steps, offset, rounds, more = [], 0, 0, True
    while more:
        report = look(run, heartbeats=offset)
        assert report.beats_offset - offset <= MAX_BYTES
        steps += [beat.step for beat in report.beats]
        offset, more, rounds = report.beats_offset, report.beats_more, rounds + 1
    assert steps == list(range(1, 3001))
    assert rounds > 2


def test_a_file_that_cannot_be_read_does_not_say_for_ever_that_there_is_more(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_ops.pod.probe.MAX_BYTES", 10)
    run.heartbeat().mkdir()
    assert not look(run, heartbeats=0).beats_more


def test_a_line_longer_than_a_probe_carries_is_passed_over(run: RunDir) -> None:
    with run.heartbeat().open("ab") as file:
        file.write(b"x" * (MAX_BYTES * 2) + b"\n")
    write_beats(run, 1, 1)
    steps, offset = [], 0
    for _ in range(4):
        report = look(run, heartbeats=offset)
        steps += [beat.step for beat in report.beats]
        offset = report.beats_offset
    assert steps == [1]


def test_the_verdict_is_the_judges_on_the_current_attempt_only(run: RunDir) -> None:
    write_beats(run, 1, 3, attempt=1)
    assert look(run).verdict.level == "healthy"
    write_beats(run, 4, 6, loss=float("nan"), finite=False)
    report = look(run)
    assert (report.verdict.level, report.verdict.rule) == ("halt", "loss_nonfinite")
    begin(run, attempt=2)
    assert look(run).verdict.level == "healthy"


def test_a_resumed_run_is_held_against_what_its_watchdog_remembers(run: RunDir) -> None:
    begin(run, attempt=2)
    for n in range(100):
        write_beats(run, n, n, attempt=2, tokens_per_s=400.0, at=time.time() - 1000 + 10 * n)
    assert look(run).verdict.level == "healthy"
    healthy = Verdict(level="healthy")
    Journal(run).show(2, healthy, "watching", "", restarts=1, best_tokens_per_s=1000.0)
    report = look(run)
    assert (report.verdict.rule, report.watchdog.best_tokens_per_s) == ("throughput_low", 1000.0)


def test_a_planned_run_shows_how_the_log_of_its_attempt_ends(run: RunDir) -> None:
    """Its runner has recorded nothing: the interpreter died at its start."""
    run.log.write_text("step 7\n")
    os.utime(run.log, (5.0, 5.0))  # of the attempt before
    assert "training.log" not in look(run).why
    run.log.write_text("step 7\nenv: python3.11: No such file or directory\n")
    report = look(run)
    assert report.state == "planned"
    assert report.why.endswith("ends with: env: python3.11: No such file or directory")


def test_checkpoints_say_whether_they_have_a_manifest(run: RunDir) -> None:
    whole = run.checkpoints / "step_000500"
    for folder in (whole, run.checkpoints / "step_001000", run.checkpoints / "tmp-1"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"12345")
    file = CheckpointFile(name="model.safetensors", size=5, sha256="0" * 64)
    manifest = CheckpointManifest(
        run_id="run-1", attempt=1, step=500, tokens_seen=1, created_unix_s=9.0,
        config_sha256="", files=[file],
    )  # fmt: skip
    (whole / MANIFEST_NAME).write_text(manifest.model_dump_json())
    run.known_good.write_text("step_000500\n")
    write_beats(run, 1, 2, loss=float("nan"), finite=False)
    assert "known good checkpoint is step 500" in look(run).verdict.sentence
    found = [(fact.step, fact.whole, fact.size_bytes >= 5) for fact in look(run).checkpoints]
    assert found == [(1000, False, True), (500, True, True)]


def save(run, step: int, content: bytes = b"12345"):
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    file = CheckpointFile(name="model.safetensors", size=5, sha256="0" * 64)
    manifest = CheckpointManifest(
        run_id="run-1", attempt=1, step=step, tokens_seen=1, created_unix_s=9.0,
        config_sha256="", files=[file],
    )  # fmt: skip
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return folder


def reject(run, folder) -> None:
    events.record(
        run, kind="checkpoint_rejected", by="trainer", attempt=1,
        message=f"{folder.name} is damaged: wrong sha256", facts={"path": str(folder)},
    )  # fmt: skip


def test_a_checkpoint_with_a_short_or_missing_file_is_not_called_whole(run: RunDir) -> None:
    save(run, 1)
    save(run, 2, b"123")
    (save(run, 3) / "model.safetensors").unlink()
    assert [(fact.step, fact.whole, fact.damage) for fact in look(run).checkpoints] == [
        (3, False, "model.safetensors should be 5 bytes and is missing"),
        (2, False, "model.safetensors should be 5 bytes and is 3 bytes"),
        (1, True, ""),
    ]


def test_a_checkpoint_that_the_trainer_rejected_is_not_called_whole(run: RunDir) -> None:
    save(run, 1)
    reject(run, save(run, 2))
    found = [(fact.step, fact.whole, fact.damage) for fact in look(run).checkpoints]
    assert found == [(2, False, "wrong sha256"), (1, True, "")]


def test_a_rejection_says_nothing_about_a_checkpoint_that_was_saved_later(run: RunDir) -> None:
    reject(run, run.checkpoint(2))
    line = run.events.read_text()
    ts = Event.model_validate_json(line).ts
    run.events.write_text(line.replace(str(ts), str(ts - 60)))
    save(run, 2)  # created at 9.0 by the clock of the machine that wrote it
    assert look(run).checkpoints[0].whole


def link_to_a_read_error(path) -> None:
    """The beginning of /proc/self/mem cannot be read: EIO."""
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, link_to_a_read_error])
def test_files_of_a_run_that_cannot_be_read_do_not_hide_the_others(run: RunDir, make) -> None:
    write_beats(run, 1, 2)
    save(run, 1)
    (save(run, 2) / MANIFEST_NAME).unlink()
    make(run.checkpoint(2) / MANIFEST_NAME)
    run.events.unlink(missing_ok=True)
    sides = (
        run.events, run.exit, run.halt, run.process, run.watchdog, run.anomaly, run.known_good,
        run.cards, run.log,
    )  # fmt: skip
    for path in sides:
        make(path)
    report = look(run)
    assert [(fact.step, fact.whole) for fact in report.checkpoints] == [(2, False), (1, True)]
    assert " and is unreadable: " in report.checkpoints[0].damage
    assert report.last_beat.step == 2
    assert [flag for flag in report.flags if flag.startswith("events.jsonl cannot be read: ")]
    run.heartbeat().unlink()
    make(run.heartbeat())
    assert [flag for flag in look(run).flags if flag.startswith("heartbeat_rank0.jsonl cannot")]


def test_a_folder_without_a_manifest_is_named_when_a_whole_checkpoint_is_sought(
    run: RunDir,
) -> None:
    save(run, 1)
    (save(run, 2) / MANIFEST_NAME).unlink()
    damaged = [(Path(found.path).name, found.damage) for found in verify_newest(run)]
    assert damaged[0] == (
        "step_000002",
        "checkpoint.json should be the checkpoint's manifest and is missing",
    )


def test_a_folder_of_runs_lists_them_without_their_lines_and_names_what_is_broken(
    run: RunDir,
) -> None:
    write_beats(run, 1, 2)
    broken = run.root.with_name("run-2")
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    run.root.with_name("no-run").mkdir()
    document = probe(run.root.parent, [], {})
    assert [(report.run_id, report.beats) for report in document.runs] == [("run-1", [])]
    assert [problem.run_id for problem in document.problems] == ["run-2"]
    assert probe(run.root.parent, ["absent"], {}).problems[0].run_id == "absent"


def test_the_program_reads_offsets_and_answers_with_one_document(run: RunDir) -> None:
    write_beats(run, 1, 2)
    events.record(run, kind="launched", by="operator", attempt=1)
    command = [sys.executable, "-m", "nsa_ops.pod.probe", "--runs-root", str(run.root.parent)]
    offsets = json.dumps({"run-1": {"heartbeats": 0, "events": 0}})
    done = subprocess.run(
        command, input=offsets, capture_output=True, text=True, check=True, timeout=30
    )
    report = ProbeDocument.model_validate_json(done.stdout).runs[0]
    assert (len(report.beats), [event.kind for event in report.events]) == (2, ["launched"])
    bad = subprocess.run(
        command, input="[", capture_output=True, text=True, timeout=30, check=False
    )
    assert bad.returncode == 2
    assert "offsets" in bad.stderr


def test_a_window_on_the_events_says_where_it_begins(run: RunDir) -> None:
    events.record(run, kind="launched", by="operator", attempt=1)
    assert look(run).events_begin == 0
    for _ in range(3):
        events.record(run, kind="note", by="operator", attempt=1, message="x" * (MAX_BYTES // 3))
    report = look(run)
    assert len(report.events) == 2
    newest = run.events.read_bytes()[report.events_begin :]
    assert newest.count(b"\n") == 2
