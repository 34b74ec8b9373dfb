"""Faults on the pod, seen through a real sshd: processes that die, a reboot, missing tools."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa_core.rundir.events import read_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.process import ProcessIdentity, identify, is_alive
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import read_processes, write_processes
from tests.integration.pod_runs import make_run, start, wait_for
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import openssh, ssh_server
from tests.integration.tcp_proxy import tcp_proxy

pytestmark = pytest.mark.integration
LONG = "schedule.steps=4000"
HASTY = (
    "watchdog.interval_s=0.2", "watchdog.ack_grace_s=1", "watchdog.term_grace_s=1",
    "watchdog.stall_min_s=2", "watchdog.stale_warn_s=1", "watchdog.stale_halt_s=3",
    "watchdog.phase_limit_s=5",
)  # fmt: skip
#: What a pod has on its PATH; a machine of the tests may have stranger ones.
TOOLS = (
    "sh bash env cat chmod cp date dd df dirname find head id ln ls mkdir mktemp mv nproc ps "
    "python3 readlink rm rsync sed setsid sha256sum sleep sort stat tail tar test tmux touch tr "
    "uname wc"
)


def trainer_of(pod: SshPod, run_id: str) -> ProcessIdentity:
    record = read_processes(pod.run_dir(run_id))
    assert record is not None
    assert record.trainer is not None
    return record.trainer


def report_of(pod: SshPod) -> dict[str, object]:
    report: dict[str, object] = pod.must("status", "--json").data["report"]
    return report


def test_a_runner_that_is_killed_leaves_the_trainer_and_its_halt(pod: SshPod) -> None:
    assert pod.launch("r1", LONG).exit_code == 0
    record = read_processes(pod.run_dir("r1"))
    assert record is not None
    os.kill(record.runner.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(record.runner))
    report = report_of(pod)
    assert (report["state"], report["runner_alive"]) == ("running", False)
    halted = pod.must("halt", "--json").data
    assert (halted["state"], halted["signals"], halted["lost_steps"]) == ("halted", [], 0)


def test_a_trainer_that_is_stopped_is_named_and_ended_by_its_watchdog(pod: SshPod) -> None:
    assert pod.launch("r1", LONG, "checkpoint.save_every=5", *HASTY).exit_code == 0
    run, trainer = pod.run_dir("r1"), trainer_of(pod, "r1")
    wait_for(lambda: run.checkpoint(5).exists())
    wait_for(lambda: read_watchdog(run))
    os.kill(trainer.pid, signal.SIGSTOP)
    wait_for(lambda: read_exit(run), 40)
    assert not is_alive(trainer)
    signals = [event.facts["signal"] for event in read_events(run) if event.kind == "signal"]
    assert signals == ["TERM", "KILL"]  # a stopped process acts on no TERM
    assert "heartbeat" in read_exit(run).reason or "stall" in read_exit(run).reason
    resumed = pod.must("resume", "--json").data
    assert resumed["from_step"] >= 5


def test_a_pod_that_was_booted_again_has_a_lost_run_that_resumes_from_its_checkpoint(
    pod: SshPod,
) -> None:
    assert pod.launch("r1", LONG, "checkpoint.save_every=5").exit_code == 0
    run = pod.run_dir("r1")
    wait_for(lambda: run.checkpoint(10).exists())
    record, watched = read_processes(run), wait_for(lambda: read_watchdog(run))
    assert record is not None
    for one in (watched.identity, record.runner, record.trainer):
        os.kill(one.pid, signal.SIGKILL)
    pod.tmux("kill-server")
    # After a boot the same numbers belong to others: here to this very test, which lives.
    mine = identify(os.getpid())
    assert mine is not None
    other = {"boot_id": "0" * 36}
    write_processes(run, record.model_copy(update={
        "runner": mine.model_copy(update=other), "trainer": mine.model_copy(update=other),
    }))  # fmt: skip
    report = report_of(pod)
    assert (report["state"], report["same_boot"]) == ("preempted", False), report["why"]
    resumed = pod.must("resume", "--json").data
    assert resumed["attempt"] == 2
    assert resumed["from_step"] >= 10


def test_a_number_that_another_process_has_now_is_not_taken_for_the_trainer(pod: SshPod) -> None:
    assert pod.launch("r1", LONG, "watchdog.restart_budget=0").exit_code == 0
    run, trainer = pod.run_dir("r1"), trainer_of(pod, "r1")
    record, watched = read_processes(run), wait_for(lambda: read_watchdog(run))
    assert record is not None
    for one in (watched.identity, record.runner, trainer):
        os.kill(one.pid, signal.SIGKILL)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        reused = trainer.model_copy(update={"pid": stranger.pid})
        write_processes(run, record.model_copy(update={"trainer": reused}))
        report = report_of(pod)
        assert (report["state"], report["trainer_alive"]) == ("lost", False)
        assert pod("halt", "r1").exit_code == 7
        assert stranger.poll() is None
        stranger.kill()


def test_an_orphan_of_the_trainer_does_not_keep_its_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, [["orphan", 300], ["beat", 3], ["sleep", 60]])
    runner = start("runner", run)
    pid = int(wait_for(lambda: (f := run.root / "orphan.pid").exists() and f.read_text()))
    child = identify(pid)
    assert child is not None
    trainer = wait_for(lambda: (r := read_processes(run)) and r.trainer)
    os.kill(trainer.pid, signal.SIGKILL)
    assert runner.wait(20) == 128 + 9
    wait_for(lambda: not is_alive(child))


def test_a_pod_without_tmux_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with bare_pod(tmp_path, "tmux") as pod:
        pod.add()
        said = pod.launch("r1", LONG)
        assert said.exit_code == 11
        assert "has no tmux on its PATH" in said.err
        assert not pod.run_dir("r1").root.exists()
        pod("pod", "rm", "here", "-y")


def test_a_pod_without_rsync_is_backed_up_all_the_same(tmp_path: Path) -> None:
    with bare_pod(tmp_path, "rsync") as pod:
        pod.add()
        assert pod.launch("r1", "schedule.steps=20").exit_code == 0
        wait_for(lambda: read_exit(pod.run_dir("r1")))
        assert pod.must("backup", "pull", "r1", "--json").data["newest_step"] == 20
        pod.stop()


def test_a_pod_without_python_is_named_with_the_way_out(tmp_path: Path) -> None:
    with bare_pod(tmp_path, "python3") as pod:
        address = ("pod", "add", "here", pod.address, "--root", str(pod.root), "-y")
        missing = pod(*address, "--python", "/no/such/python3")
        assert (missing.exit_code, "`/no/such/python3` does not exist" in missing.err) == (6, True)
        pod.must(*address, "--profile", "cpu")
        said = pod.launch("r1", LONG)
        assert said.exit_code in {6, 11}
        assert "python3` does not exist on" in said.err
        pod("pod", "rm", "here", "-y")


@contextmanager
def bare_pod(folder: Path, missing: str) -> Iterator[SshPod]:
    """A pod whose login finds every program that a pod needs but one."""
    tools = folder / "tools"
    tools.mkdir()
    for name in set(TOOLS.split()) - {missing}:
        program = shutil.which(name)
        assert program is not None, name
        (tools / name).symlink_to(program)
    with (
        ssh_server(folder / "sshd", environment={"PATH": str(tools)}) as server,
        tcp_proxy(server.port) as proxy,
    ):
        yield SshPod(folder, server=server, proxy=proxy)


@pytest.mark.parametrize("shell", ["fish", "zsh", "dash", "bash"])
def test_any_login_shell_runs_a_command_with_hostile_words(tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = f'ForceCommand exec {program} -c "$SSH_ORIGINAL_COMMAND"\n'
    words = ["$HOME", "a'b\"c\\", "two\nlines", "é", "*", "$(id)"]
    with (
        ssh_server(tmp_path / "sshd", options=command) as server,
        openssh(server.target(tmp_path / "s")) as transport,
    ):
        done = transport.run(["printf", "%s\\0", *words], timeout_s=20)
        assert done.stdout.decode().split("\0")[:-1] == words
        assert transport.run(["sh", "-c", "exit 7"], timeout_s=20).exit_code == 7
