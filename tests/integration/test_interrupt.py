"""Ctrl-C in a long command: what it started on the pod is ended, recorded, and said truly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_ops.remote.audit import first_broken_line
from tests.integration.local_pod import LocalPod
from tests.integration.pod_runs import wait_for
from tests.integration.ssh_pod import SshPod

pytestmark = pytest.mark.integration


def stall_probes(pod: LocalPod) -> Path:
    """Have every probe of the pod's interpreter run for a minute, with a child of its own."""
    pids = pod.folder / "pids"
    python = pod.folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *nsa_core.checks*) echo $$ >> {pids}; sleep 60 & echo $! >> {pids}; wait;; '
        f'esac\nexec {sys.executable} "$@"\n'
    )
    return pids


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def running(pids: Path) -> list[int]:
    return [pid for pid in map(int, pids.read_text().split()) if is_running(pid)]


def both_run(pids: Path) -> bool:
    return pids.is_file() and len(running(pids)) == 2


def preflight(pod: LocalPod, pids: Path) -> subprocess.Popen[bytes]:
    """A preflight whose probe is under way."""
    asking = pod.start("preflight", "here", "--profile", "cpu")
    wait_for(lambda: both_run(pids), 60)
    time.sleep(1)  # its first mark has come through the proxy too
    return asking


def check_ended(
    pod: LocalPod, asking: subprocess.Popen[bytes], pids: Path, by: str = "Ctrl-C"
) -> None:
    asking.send_signal(signal.SIGTERM if by == "TERM" else signal.SIGINT)
    began_s = time.monotonic()
    _, err = asking.communicate(timeout=30)
    assert time.monotonic() - began_s < 10
    said = err.decode()
    assert asking.returncode == (143 if by == "TERM" else 130), said
    assert f"Stopped by {by}: no verdict was recorded; `" in said
    assert said.rstrip().endswith("was ended")
    assert running(pids) == []
    audit = pod.folder / "state" / "audit.jsonl"
    ends = [json.loads(line) for line in audit.read_text().splitlines()]
    errors = [end["error"] for end in ends if "error" in end]
    assert any(error.startswith(f"interrupted by {by}; `") for error in errors)
    assert first_broken_line(audit) is None
    listed = pod.must("audit", "--failed", "--json").data["entries"]
    assert any(f"interrupted by {by}" in entry["outcome"] for entry in listed)


@pytest.mark.parametrize("by", ["Ctrl-C", "TERM"])
def test_the_probe_of_a_preflight_over_ssh_is_ended(pod: SshPod, by: str) -> None:
    pids = stall_probes(pod)
    check_ended(pod, preflight(pod, pids), pids, by)


def test_the_probe_of_a_preflight_on_this_machine_is_ended(tmp_path: Path) -> None:
    pod = LocalPod(tmp_path)
    pod.add()
    pids = stall_probes(pod)
    check_ended(pod, preflight(pod, pids), pids)


def test_what_runs_on_behind_a_dead_link_is_said(pod: SshPod) -> None:
    pids = stall_probes(pod)
    asking = preflight(pod, pids)
    pod.proxy.is_stalled = True
    asking.send_signal(signal.SIGINT)
    _, err = asking.communicate(timeout=60)
    pod.proxy.is_stalled = False
    said = err.decode()
    assert asking.returncode == 130, said
    left = running(pids)
    assert len(left) == 2, "nobody could end it"
    assert "was cut off, and may still run there as process " in said
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_a_second_ctrl_c_leaves_at_once_and_says_what_may_run_on(pod: SshPod) -> None:
    pids = stall_probes(pod)
    asking = preflight(pod, pids)
    pod.proxy.is_stalled = True
    asking.send_signal(signal.SIGINT)
    time.sleep(2)
    asking.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    _, err = asking.communicate(timeout=60)
    pod.proxy.is_stalled = False
    assert time.monotonic() - began_s < 4
    assert asking.returncode == 130
    assert "may still run there as process " in err.decode()
    for pid in running(pids):
        os.kill(pid, signal.SIGKILL)


def test_a_command_that_is_killed_leaves_a_beginning_without_an_end(pod: SshPod) -> None:
    pids = stall_probes(pod)
    asking = preflight(pod, pids)
    asking.kill()
    asking.communicate(timeout=30)
    said = pod.must("audit", "--failed")
    assert b"interrupted, end unknown: 1" in said.out
    assert b"was killed, and what it began may still run there" in said.out
    for pid in running(pids):
        os.kill(pid, signal.SIGKILL)
