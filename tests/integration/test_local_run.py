"""The everyday path on this machine as its own pod: real tmux, runner and watchdog, a stand-in
trainer that counts steps."""

import json
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import read_manifest
from nsa_core.rundir.process import is_alive
from nsa_ops.pod.processes import read_processes
from nsa_ops.remote.audit import first_broken_line
from tests.integration.local_pod import CANARY, LocalPod
from tests.integration.pod_runs import wait_for

pytestmark = pytest.mark.integration
LONG = "schedule.steps=4000"


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[LocalPod]:
    local = LocalPod(tmp_path)
    local.add()
    yield local
    local.stop()


def test_launch_halt_and_resume_go_on_where_the_run_stopped(pod: LocalPod) -> None:
    pod.lose_code()
    launched = pod.launch("r1", LONG)
    assert launched.exit_code == 0, launched
    assert launched.data["is_new"] is True
    assert launched.data["first_beat_after_s"] is not None
    told = [event.kind for event in read_events(pod.run_dir("r1"))]
    assert told[:2] == ["launched", "started"]
    assert pod("status", "--exit-code").exit_code == 21
    windows = pod.tmux("list-windows", "-t", "nsa-r1", "-F", "#{window_name}").split()
    assert windows == ["train", "watchdog"]

    halted = pod.must("halt", "--reason", "lunch", "--json").data
    assert (halted["state"], halted["was_running"], halted["signals"]) == (
        "halted", True, []
    )  # fmt: skip
    assert halted["checkpoint"]["step"] == halted["step"]
    assert halted["lost_steps"] == 0
    assert pod("status", "--exit-code").exit_code == 24

    resumed = pod.must("resume", "--json").data
    assert (resumed["attempt"], resumed["from_step"]) == (2, halted["step"])
    assert resumed["differences"] == []
    kept = pod.run_dir("r1").attempt(1)
    assert (kept / "manifest.json").exists()
    assert (kept / "exit.json").exists()
    beats = read_records(pod.run_dir("r1").heartbeat(), Heartbeat).records
    second = [beat.step for beat in beats if beat.attempt == 2 and beat.loss is not None]
    assert second[0] == halted["step"] + 1


def test_the_same_launch_twice_returns_the_run_and_another_one_is_a_conflict(
    pod: LocalPod,
) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    trainer = read_processes(pod.run_dir("r1"))
    again = pod.launch("r1", LONG)
    assert (again.exit_code, again.data["is_new"]) == (0, False)
    assert read_processes(pod.run_dir("r1")) == trainer
    other = pod.launch("r1", LONG, "seed=7")
    assert other.exit_code == 7
    assert "exists with another config" in other.err
    assert read_manifest(pod.run_dir("r1")).config.seed != 7


def test_a_directory_that_is_no_run_is_left_alone(pod: LocalPod) -> None:
    stranger = pod.root / "runs" / "r1"
    stranger.mkdir()
    (stranger / "precious.txt").write_text("mine")
    said = pod.launch("r1", LONG)
    assert said.exit_code == 7
    assert "is not a run directory" in said.err
    assert [path.name for path in stranger.iterdir()] == ["precious.txt"]


def test_a_killed_command_line_leaves_a_run_that_the_next_launch_finds(pod: LocalPod) -> None:
    launching = pod.start(
        "launch", "--run-id", "r1", "--trainer", "tests.integration.steady_trainer",
        "--override", "preflight=a test", "--set", LONG,
    )  # fmt: skip
    wait_for(pod.run_dir("r1").manifest.exists, timeout_s=30)
    launching.kill()
    launching.communicate()
    said = pod.launch("r1", LONG)
    assert said.exit_code == 0, said
    wait_for(pod.run_dir("r1").heartbeat().exists, timeout_s=30)
    beats = read_records(pod.run_dir("r1").heartbeat(), Heartbeat).records
    assert len({beat.pid for beat in beats}) == 1


def test_the_run_outlives_tmux_its_runner_and_its_watchdog(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    record = read_processes(pod.run_dir("r1"))
    assert record is not None
    assert record.trainer is not None
    wait_for(pod.run_dir("r1").watchdog.exists, timeout_s=30)
    pod.tmux("kill-server")
    watched = pod.must("status", "--json").data["report"]
    assert (watched["runner_alive"], watched["watchdog_alive"]) == (True, True)
    watchdog = watched["watchdog"]["identity"]["pid"]
    for pid in (watchdog, record.runner.pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(record.runner), timeout_s=30)
    assert is_alive(record.trainer)
    alone = pod.must("status", "--json").data["report"]
    assert (alone["state"], alone["flags"]) == ("running", ["unwatched"])


def test_after_kill_9_of_the_trainer_resume_goes_on_from_the_newest_checkpoint(
    pod: LocalPod,
) -> None:
    sets = (LONG, "checkpoint.save_every=5", "watchdog.restart_budget=0")
    assert pod.launch("r1", *sets).exit_code == 0
    run = pod.run_dir("r1")
    wait_for(lambda: run.checkpoint(10).exists(), timeout_s=30)
    pod.kill_trainer("r1")
    wait_for(lambda: read_exit(run) is not None, timeout_s=30)
    assert pod("status", "--exit-code").exit_code == 20
    resumed = pod.must("resume", "--json").data
    assert resumed["from_step"] >= 10
    assert resumed["from_step"] % 5 == 0


def test_a_halt_before_the_watchdog_restarts_a_crashed_run_keeps_it_stopped(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG, "watchdog.interval_s=20").exit_code == 0
    run = pod.run_dir("r1")
    wait_for(run.watchdog.exists, timeout_s=30)
    pod.kill_trainer("r1")
    wait_for(lambda: read_exit(run) is not None, timeout_s=30)
    assert pod("status", "--exit-code").exit_code == 21
    halted = pod.must("halt", "--json").data
    assert (halted["state"], halted["was_running"], halted["attempt"]) == ("failed", True, 1)
    wait_for(lambda: "not_restarted" in [event.kind for event in read_events(run)], timeout_s=30)
    assert read_manifest(run).attempt == 1
    assert pod("status", "--exit-code").exit_code == 20


def test_a_flipped_bit_is_passed_over_and_told(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG, "checkpoint.save_every=5").exit_code == 0
    halted = pod.must("halt", "--json").data
    (Path(halted["checkpoint"]["path"]) / "state.txt").write_text("0")
    plan = pod.must("resume", "--plan").out.decode()
    assert f"passed over a damaged checkpoint: step_{halted['step']:06d}" in plan
    older = pod.must("resume", "--json").data
    assert older["from_step"] < halted["step"]


def test_a_missing_checkpoint_path_is_one_clear_line(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    pod.must("halt")
    said = pod("resume", "--from", "runs/r1/checkpoints/step_999999")
    assert said.exit_code == 6
    assert "step_999999` does not exist on pod `here`" in said.err
    assert read_manifest(pod.run_dir("r1")).attempt == 1
    fresh = pod.launch("r2", LONG, more=["--resume-from", "no/such"])
    assert fresh.exit_code == 6
    assert not pod.run_dir("r2").root.exists()


def test_a_run_that_begins_from_another_names_its_parent(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    halted = pod.must("halt", "--json").data
    path = halted["checkpoint"]["path"]
    assert pod.launch("r2", LONG, more=["--resume-from", path]).exit_code == 0
    manifest = read_manifest(pod.run_dir("r2"))
    assert manifest.parent is not None
    assert (manifest.parent.run_id, manifest.parent.step) == ("r1", halted["step"])
    assert manifest.resume == path


def test_a_missing_data_set_is_refused_before_anything_is_made(pod: LocalPod) -> None:
    said = pod.launch("r1", "data.source=fineweb_edu_local", "data.path=/no/such/text")
    assert said.exit_code == 6
    assert "The data set `/no/such/text` does not exist on pod `here`" in said.err
    assert not pod.run_dir("r1").root.exists()


def test_launch_without_a_green_preflight_is_refused_with_the_command(pod: LocalPod) -> None:
    said = pod("launch", "--run-id", "r1", "--trainer", "tests.integration.steady_trainer")
    assert said.exit_code == 3
    assert "has no preflight for code" in said.err
    assert "`nsa-ops preflight here --profile cpu`" in said.err
    assert not pod.run_dir("r1").root.exists()


def test_watch_gives_every_record_once_and_ends_with_the_run(pod: LocalPod) -> None:
    assert pod.launch("r1", "schedule.steps=60").exit_code == 0
    watched = pod.must("watch", "--json", "--from-start")
    frames = [json.loads(line) for line in watched.out.splitlines()]
    assert {frame["schema"] for frame in frames} == {"nsa-ops/watch/1"}
    beats = [beat for frame in frames for beat in frame["data"]["beats"]]
    written = read_records(pod.run_dir("r1").heartbeat(), Heartbeat).records
    assert [beat["alive_seq"] for beat in beats] == [beat.alive_seq for beat in written]
    assert frames[-1]["data"]["report"]["state"] == "finished"


def test_logs_are_the_bytes_of_the_file(pod: LocalPod) -> None:
    assert pod.launch("r1", "schedule.steps=60").exit_code == 0
    followed = pod.must("logs", "-f", "--raw").out
    log = pod.run_dir("r1").log.read_bytes()
    assert followed == log
    assert pod.must("logs", "--raw", "--offset", "7").out == log[7:]
    assert pod.must("logs", "--raw", "--offset", "-9").out == log[-9:]
    pod.run_dir("r1").log.write_bytes(b"10 %\r20 %\r\n\x1b[2J\xff\xe2\x80\xae\xc2\x9b\tend")
    assert pod.must("logs").out == b"10 %\n20 %\n\\x1b[2J\\xff\\u202e\\x9b\tend"
    told = json.loads(pod.must("logs", "--json").out)["data"]["text"]
    assert told == "10 %\r20 %\r\n\x1b[2J\ufffd\u202e\x9b\tend"


def test_raw_bytes_of_a_log_never_reach_a_terminal(pod: LocalPod) -> None:
    master, terminal = pty.openpty()
    try:
        refused = subprocess.run(
            [*pod.command, "logs", "r1", "--raw"], cwd=pod.folder, env=pod.environment,
            stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    finally:
        os.close(terminal)
        os.close(master)
    assert refused.returncode == 2
    assert b"a terminal would obey them" in refused.stderr


def test_ctrl_c_in_watch_leaves_the_run_alone(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    watching = pod.start("watch")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=30)
    assert watching.returncode == 130
    assert "Stopped by Ctrl-C: the run continues" in err.decode()
    assert pod("status", "--exit-code").exit_code == 21


def test_a_checkpoint_and_stacks_come_on_request(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    saved = pod.must("checkpoint", "--json").data
    assert (pod.run_dir("r1").checkpoints / saved["checkpoint"]["name"]).is_dir()
    assert "in train" in pod.must("stack").out.decode()
    assert pod("status", "--exit-code").exit_code == 21


def test_halting_twice_and_halting_nothing_are_both_clear(pod: LocalPod) -> None:
    assert pod("halt").exit_code == 6
    assert pod.launch("r1", LONG).exit_code == 0
    first = pod.must("halt", "--json").data
    second = pod.must("halt", "--json").data
    assert (first["was_running"], second["was_running"]) == (True, False)
    assert first["checkpoint"]["step"] == second["checkpoint"]["step"]


def test_secrets_of_the_laptop_are_nowhere_on_the_pod_and_the_audit_holds(pod: LocalPod) -> None:
    """Neither those of the environment nor those that somebody typed into a reason."""
    said = pod.launch("r1", LONG, more=["--override", f"recipe=with HF_TOKEN={CANARY}"])
    assert said.exit_code == 0
    record = read_processes(pod.run_dir("r1"))
    assert record is not None
    assert record.trainer is not None
    server = pod.tmux("display-message", "-p", "#{pid}").strip()
    for pid in (record.trainer.pid, record.runner.pid, server):
        assert CANARY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    halted = pod.must("halt", "--reason", f"the password is {CANARY}, rotate it", "--json")
    for one in (said, halted, pod.must("events", "--json"), pod.must("report")):
        assert CANARY.encode() not in one.out
        assert CANARY not in one.err
    assert "the password is [redacted] rotate it" in halted.err
    found = [
        path
        for folder in (pod.folder / "state", pod.root)
        for path in folder.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert [path for path in found if "code" not in path.parts] == []
    assert first_broken_line(pod.folder / "state" / "audit.jsonl") is None


def test_the_run_may_be_left_out_where_only_one_fits(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    pod.must("halt")
    assert pod.launch("r2", LONG).exit_code == 0
    assert pod.must("halt", "--json").data["run_id"] == "r2"
    said = pod("resume")
    assert said.exit_code == 2
    assert "Which run? 2 fit: `r2`, `r1`" in said.err


def test_no_process_is_left_when_a_deadline_cuts_the_wait(pod: LocalPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    os.kill(_trainer_pid(pod, "r1"), signal.SIGSTOP)
    said = pod("checkpoint", "--timeout", "5")
    os.kill(_trainer_pid(pod, "r1"), signal.SIGCONT)
    assert said.exit_code == 8
    assert "Waited 5 s for a new checkpoint" in said.err


def _trainer_pid(pod: LocalPod, run_id: str) -> int:
    record = read_processes(pod.run_dir(run_id))
    assert record is not None
    assert record.trainer is not None
    return record.trainer.pid


@contextmanager
def pod_on_a_disk(folder: Path, size: str, *, has_code: bool) -> Iterator[LocalPod]:
    """A pod with a disk of its own."""
    local = LocalPod(folder, has_code=has_code)
    local.root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(local.root)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this machine refuses a tmpfs mount: {refused.stderr.strip()}")
    local.add()
    yield local
    local.stop()
    subprocess.run(["umount", "--lazy", str(local.root)], check=True)


@pytest.fixture
def full_pod(tmp_path: Path) -> Iterator[LocalPod]:
    """A pod whose disk has 256 KiB."""
    with pod_on_a_disk(tmp_path, "256k", has_code=False) as local:
        yield local


def test_a_resume_on_a_full_disk_is_refused_before_an_attempt_is_begun(tmp_path: Path) -> None:
    with pod_on_a_disk(tmp_path, "300m", has_code=True) as pod:
        assert pod.launch("r1", LONG).exit_code == 0
        pod.must("halt")
        free = shutil.disk_usage(pod.root).free
        (pod.root / "full").write_bytes(bytes(free - 2**20))
        said = pod("resume")
        assert said.exit_code == 11, said
        assert "and a checkpoint of this run needs 5.46 MiB and 64 MiB to spare" in said.err
        pull, prune = "backup pull --checkpoint all r1", "backup prune --on-pod --keep 1 r1"
        assert f"such as with `nsa-ops {pull}`, then `nsa-ops {prune}`" in said.err
        assert read_manifest(pod.run_dir("r1")).attempt == 1
        assert not pod.run_dir("r1").attempt(1).exists()
        (pod.root / "full").unlink()
        assert pod.must("resume", "--json").data["attempt"] == 2


def test_a_full_disk_is_refused_and_with_an_override_leaves_nothing_half_done(
    full_pod: LocalPod,
) -> None:
    refused = full_pod.launch("r1", LONG)
    assert refused.exit_code == 3
    assert "checkpoints need" in refused.err
    said = full_pod.launch("r1", LONG, more=["--override", "disk=let us see"])
    assert said.exit_code == 11
    assert "No space left on device" in said.err
    left = [path for path in full_pod.root.rglob("*") if path.is_file()]
    assert left == []
