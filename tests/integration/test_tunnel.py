"""The tunnel: TensorBoard of a run through a real sshd, and nothing of it afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from nsa_ops.remote.snapshot import code_root
from tests.integration.local_pod import LocalPod
from tests.integration.ssh_pod import SshPod
from tests.integration.trainer_runs import wait_for

pytestmark = pytest.mark.integration
#: A stand-in that serves what it was told on the port it was told, as TensorBoard does.
FAKE = """\
import http.server, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(words["--logdir"].encode())
http.server.HTTPServer((words["--host"], int(words["--port"])), Page).serve_forever()
"""


def plant(folder: Path, content: str) -> None:
    """A package of that name before any other on the pod."""
    package = folder / "planted" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(f"if __name__ == '__main__':\n    exec({content!r})\n")
    python = folder / "python"
    path = f"{folder}/planted:$PYTHONPATH:{code_root()}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} "$@"\n')


@pytest.fixture
def pod(new_pod: SshPod, tmp_path: Path) -> SshPod:
    new_pod.add()
    plant(tmp_path, FAKE)
    assert new_pod.launch("r1", "schedule.steps=10").exit_code == 0
    return new_pod


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def open_tunnel(pod: LocalPod) -> tuple["subprocess.Popen[bytes]", dict]:
    process = pod.start("tunnel", "r1", "--json")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=20)
    return process, json.loads(line)["data"]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_the_tunnel_shows_the_runs_board_and_ends_with_its_command(pod: SshPod) -> None:
    planned = pod.must("tunnel", "r1", "--plan").out.decode()
    assert "-m tensorboard.main --logdir" in planned
    process, found = open_tunnel(pod)
    assert read(found["url"]) == str(pod.run_dir("r1").root / "tb")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert b"have ended, and the run continues" in err
    wait_for(lambda: not is_alive(found["pod_pid"]))
    with pytest.raises(urllib.error.URLError):
        read(found["url"])


def test_a_killed_command_leaves_no_board_behind(pod: SshPod) -> None:
    process, found = open_tunnel(pod)
    assert is_alive(found["pod_pid"])
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: not is_alive(found["pod_pid"]))


def test_a_lost_link_ends_the_tunnel_with_5_and_the_board_with_it(pod: SshPod) -> None:
    process, found = open_tunnel(pod)
    pod.proxy.cut()
    _, err = process.communicate(timeout=40)
    assert process.returncode == 5, err
    wait_for(lambda: not is_alive(found["pod_pid"]))


def test_a_board_that_does_not_start_says_why(pod: SshPod, tmp_path: Path) -> None:
    main = tmp_path / "planted" / "tensorboard" / "main.py"
    main.write_text("if __name__ == '__main__':\n    raise SystemExit('no such log folder')\n")
    said = pod("tunnel", "r1")
    assert said.exit_code == 11, said
    assert "no such log folder" in said.err
    main.write_text("raise ImportError('not here')\n")
    lacking = pod("tunnel", "r1", "--plan")
    assert (lacking.exit_code, "has no TensorBoard" in lacking.err) == (11, True)


def test_on_this_machine_nothing_is_forwarded(tmp_path: Path) -> None:
    local = LocalPod(tmp_path)
    local.add()
    plant(tmp_path, FAKE)
    try:
        assert local.launch("r1", "schedule.steps=10").exit_code == 0
        process, found = open_tunnel(local)
        assert found["url"].endswith(f":{found['pod_port']}")
        assert read(found["url"]).endswith("r1/tb")
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
        wait_for(lambda: not is_alive(found["pod_pid"]))
        began_s = time.monotonic()
        assert local("tunnel", "r1", "--timeout", "1").exit_code == 0
        assert time.monotonic() - began_s < 30
    finally:
        local.stop()
