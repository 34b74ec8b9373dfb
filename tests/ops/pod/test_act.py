import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest
from nsa_ops.pod.act import act
from nsa_ops.pod.messages import (
    HaltAction,
    NextAttemptAction,
    PrepareRunAction,
    Reply,
    SignalAction,
)
from nsa_ops.pod.processes import hold_lock, take_lock
from tests.ops.pod.ends import write_end


def manifest(run_id: str = "run-1", **fields) -> RunManifest:
    return RunManifest(
        run_id=run_id, config=RunConfig(), config_sha256="0" * 64, created_unix_s=1.0, **fields
    )


def do(action) -> Reply:
    return act(action.model_dump_json().encode())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "run-1")
    reply = do(PrepareRunAction(run_dir=run.root, manifest=manifest()))
    assert (reply.code, reply.outcome) == (0, "done")
    return run


def test_the_same_launch_twice_returns_the_run(run: RunDir) -> None:
    again = manifest().model_copy(update={"created_unix_s": 99.0, "pod_facts": {"cards": 1}})
    reply = do(PrepareRunAction(run_dir=run.root, manifest=again))
    assert (reply.code, reply.outcome, reply.manifest.created_unix_s) == (0, "already", 1.0)


def test_another_launch_under_the_same_id_is_a_conflict_that_names_the_difference(
    run: RunDir,
) -> None:
    other = manifest(profile="a100", code_id="abc")
    reply = do(PrepareRunAction(run_dir=run.root, manifest=other))
    assert (reply.code, reply.outcome) == (7, "conflict")
    assert "profile, code_id" in reply.message
    assert read_manifest(run).profile == "none"


def test_a_conflict_names_the_keys_that_differ_with_both_values(run: RunDir) -> None:
    config = RunConfig()
    sizes = {"seq_len": 96, "micro_batch": config.batch.micro_batch}
    schedule = config.schedule.model_copy(update={"steps": 7})
    batch = config.batch.model_copy(update=sizes)
    other = manifest().model_copy(
        update={"config": config.model_copy(update={"schedule": schedule, "batch": batch})}
    )
    reply = do(PrepareRunAction(run_dir=run.root, manifest=other))
    assert "exists with another config: " in reply.message
    assert f"schedule.steps is {config.schedule.steps} there and 7 here" in reply.message
    assert f"batch.seq_len is {config.batch.seq_len} there and 96 here" in reply.message
    assert "micro_batch" not in reply.message


def test_a_directory_without_a_manifest_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "thesis.txt").write_text("mine")
    reply = do(PrepareRunAction(run_dir=tmp_path / "run-1", manifest=manifest()))
    assert (reply.code, reply.outcome) == (7, "refused")
    assert [path.name for path in tmp_path.rglob("*")] == ["run-1", "thesis.txt"]


def test_preparing_leaves_no_temporary_folder(run: RunDir) -> None:
    assert [path.name for path in run.root.parent.iterdir()] == ["run-1"]


def test_a_halt_is_bound_to_the_attempt_and_recorded_once(run: RunDir) -> None:
    for outcome in ("done", "already"):
        reply = do(HaltAction(run_dir=run.root, reason="enough"))
        assert (reply.code, reply.outcome) == (0, outcome)
    request = read_halt(run, run_id="run-1", attempt=1)
    assert (request.reason, request.by) == ("enough", "operator")
    assert [event.kind for event in read_events(run)] == ["launched", "halt_asked"]


def test_a_halt_is_asked_though_its_event_cannot_be_written(run: RunDir) -> None:
    run.events.unlink(missing_ok=True)
    run.events.mkdir()
    reply = act(
        HaltAction(run_dir=run.root, reason="stop", by="operator").model_dump_json().encode()
    )
    assert reply.outcome == "done", reply
    assert reply.message.endswith("; it could not be recorded in events.jsonl: Is a directory")
    assert read_halt(run, run_id="run-1", attempt=1) is not None


def test_a_directory_that_cannot_be_changed_is_named_with_what_to_do(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> Reply:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("nsa_ops.pod.act.halt", refuse)
    reply = do(HaltAction(run_dir=run.root, reason="enough"))
    assert (reply.code, reply.hint.startswith("Mount the file system for writing")) == (11, True)
    assert reply.message == f"`{run.root}` cannot be changed: Read-only file system"


def test_a_halt_that_means_another_attempt_is_a_conflict(run: RunDir) -> None:
    reply = do(HaltAction(run_dir=run.root, attempt=3, reason="enough"))
    assert reply.code == 7
    assert not run.halt.exists()


def test_a_run_that_has_ended_needs_no_halt(run: RunDir) -> None:
    write_end(run)
    assert do(HaltAction(run_dir=run.root, reason="enough")).outcome == "already"
    assert not run.halt.exists()


def test_the_next_attempt_begins_once_and_keeps_what_ended(run: RunDir) -> None:
    write_end(run)
    asked = NextAttemptAction(run_dir=run.root, from_attempt=1, changes={"resume": "auto"})
    assert [do(asked).outcome for _ in range(2)] == ["done", "already"]
    assert read_manifest(run).attempt == 2
    assert read_exit(run) is None
    assert (run.attempt(1) / "exit.json").exists()


def test_the_next_attempt_begins_where_a_folder_has_the_name_of_the_events(run: RunDir) -> None:
    write_end(run)
    run.events.unlink(missing_ok=True)
    run.events.mkdir()
    assert do(NextAttemptAction(run_dir=run.root, from_attempt=1)).outcome == "done"
    assert [event.kind for event in read_events(run)] == ["unreadable", "resumed"]
    assert run.events.with_name("events.jsonl.aside-1").is_dir()


def test_the_next_attempt_does_not_begin_beside_a_living_trainer(run: RunDir) -> None:
    with hold_lock(run.runner_lock):
        assert do(NextAttemptAction(run_dir=run.root, from_attempt=1)).code == 7
    assert read_manifest(run).attempt == 1


def test_the_next_attempt_waits_for_a_trainer_that_has_recorded_its_end(run: RunDir) -> None:
    write_end(run)
    leaving = take_lock(run.runner_lock)
    threading.Timer(0.5, os.close, [leaving]).start()
    assert do(NextAttemptAction(run_dir=run.root, from_attempt=1)).outcome == "done"
    assert read_manifest(run).attempt == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"run_id": "other"}, "run_id"), ({"profile": 3}, "not valid"), ({"config": {"x": 1}}, "not")],
)
def test_a_change_that_makes_no_manifest_is_refused_before_anything_moves(
    run: RunDir, changes: dict[str, dict[str, int]] | dict[str, int] | dict[str, str], words: str
) -> None:
    write_end(run)
    reply = do(NextAttemptAction(run_dir=run.root, from_attempt=1, changes=changes))
    assert reply.code == 2
    assert words in reply.message
    assert read_manifest(run).attempt == 1
    assert read_exit(run) is not None


def test_a_signal_without_a_recorded_trainer_finds_nobody(run: RunDir) -> None:
    reply = do(SignalAction(run_dir=run.root, signal="TERM"))
    assert (reply.code, reply.outcome) == (6, "not_found")
    assert [event.kind for event in read_events(run)] == ["launched"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"action": "dance"}', b"\xff", b'{"action":'])
def test_a_request_that_cannot_be_read_is_a_usage_error(content: bytes) -> None:
    assert act(content).code == 2


def test_an_action_on_no_run_says_so(tmp_path: Path) -> None:
    assert do(HaltAction(run_dir=tmp_path / "nothing", reason="r")).code == 6


def test_the_program_answers_in_json_and_with_its_exit_code(run: RunDir) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsa_ops.pod.act"],
        input=HaltAction(run_dir=run.root, reason="enough").model_dump_json(),
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert Reply.model_validate(json.loads(done.stdout)).outcome == "done"
