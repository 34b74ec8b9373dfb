"""The everyday path of the README, typed as it stands there, on this machine as its own pod."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY, Command, fenced_commands
from tests.tmux_server import end_server

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

CHANGING = {"pod add", "launch", "halt", "resume", "backup pull"}
DEADLINE_S = 300.0


class Reader:
    """Somebody who types what the README says, in a home and a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = f"nsa-readme-{os.getpid()}"
        inherited = ("PATH", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
        kept = {name: os.environ[name] for name in inherited if name in os.environ}
        self.environment = kept | {
            "HOME": str(root),
            "PYTHONPATH": str(REPOSITORY),
            "NSA_OPS_STATE_DIR": str(root / "state"),
            "NSA_OPS_TMUX_SOCKET": self.socket,
        }

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One command; nobody is there to answer, so what would ask is told `-y`."""
        asks = words[0] in CHANGING or " ".join(words[:2]) in CHANGING
        return subprocess.run(
            [sys.executable, "-m", "nsa_ops", *words, *(["-y"] if asks else [])],
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def wait_for_step(self, step: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.last_step() < step:
            assert time.monotonic() < deadline_s, f"step {step} never came"
            time.sleep(1)

    def last_step(self) -> int:
        data = json.loads(self.type("status", "--json").stdout)["data"]
        beat = data["report"]["last_beat"]
        return beat["step"] if beat else 0


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    somebody = Reader(tmp_path)
    yield somebody
    somebody.type("halt")
    end_server(somebody.socket)


def everyday_path() -> list[Command]:
    commands = list(fenced_commands(REPOSITORY / "README.md"))
    assert [command.words[0] for command in commands] == [
        "pod", "preflight", "launch", "watch", "halt", "backup", "backup", "resume", "status",
        "report",
    ]  # fmt: skip
    return commands


def test_every_command_of_the_readme_works_as_it_stands(reader: Reader) -> None:
    for command in everyday_path():
        if command.words[0] == "halt":
            reader.wait_for_step(5)
        done = reader.type(*command.words)
        assert done.returncode == 0, f"{command.line}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{command.line} has no result"
    (page,) = reader.root.glob("report-*.html")
    assert "<html" in page.read_text()
