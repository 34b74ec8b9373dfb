"""This machine as a pod of its own: a state folder, a root, a tmux server, and the real command."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity, is_alive
from nsa_core.rundir.ranks import RankProcess
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import read_processes
from nsa_ops.remote.snapshot import code_root
from tests.integration.shipped_code import put_code
from tests.integration.warm import Said, agent_server, run_warm
from tests.integration.warm_agent import write_client
from tests.tmux_server import end_server

STEADY = "tests.integration.steady_trainer"
#: Of this process alone: tests look for it in every process, and other workers have theirs.
CANARY = f"canary-{secrets.token_hex(4)}"
_DEADLINE_S = 120


@dataclass(frozen=True)
class LocalPod:
    """A pod named `here`; stop it at the end of a test.

    Attributes:
        has_code: It has the code of this checkout before the first launch.
    """

    folder: Path
    socket: str = field(default_factory=lambda: f"nsa-test-{secrets.token_hex(4)}")
    has_code: bool = True

    @property
    def root(self) -> Path:
        return self.folder / "pod"

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.root / "runs" / run_id)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(code_root()),
            "NSA_OPS_STATE_DIR": str(self.folder / "state"),
            "NSA_OPS_TMUX_SOCKET": self.socket,
            "HF_TOKEN": CANARY,
        }

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "nsa_ops")

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        # A test suite that runs as a background job ignores Ctrl-C, and its children inherit that.
        return subprocess.Popen(
            ["env", "--default-signal=INT", *self.command, *words],
            cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, *words: str, deadline_s: float = _DEADLINE_S) -> Said:
        environment = self.environment
        return run_warm(words, folder=self.folder, environment=environment, limit_s=deadline_s)

    def must(self, *words: str) -> Said:
        said = self(*words)
        assert said.exit_code == 0, (words, said)
        return said

    def write_python(self) -> Path:
        """An interpreter that can import the stand-in trainer, which is not shipped."""
        if self.has_code:
            put_code(self.root)
        python = self.folder / "python"
        write_client(python, agent_server(), code_root())
        return python

    def lose_code(self) -> None:
        """From now on a launch has to ship it."""
        shutil.rmtree(self.root / "code")

    def add(self) -> None:
        """Make the pod."""
        python = self.write_python()
        self.must(
            "pod", "add", "here", f"local:{self.root}", "--profile", "cpu", "--python", str(python)
        )

    def launch(self, run_id: str, *sets: str, more: Sequence[str] = ()) -> Said:
        """Launch the stand-in trainer."""
        flags = [word for one in sets for word in ("--set", one)]
        return self(
            "launch", "--run-id", run_id, "--trainer", STEADY, "--override", "preflight=a test",
            *flags, *more, "--json",
        )  # fmt: skip

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self.socket, *words], capture_output=True, text=True, check=False
        )
        return done.stdout

    def kill_trainer(self, run_id: str) -> None:
        """kill -9 of the recorded trainer."""
        record = read_processes(self.run_dir(run_id))
        assert record is not None
        assert record.trainer is not None
        os.kill(record.trainer.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End what this pod started, by recorded identity: all of it outlives its tmux server.

        The watchdog goes first, because it would start a killed trainer again.
        """
        end_server(self.socket)
        end_runs(self.root)


def end_runs(root: Path) -> None:
    """End what the runs of a pod have left, by recorded identity."""
    for folder in (root / "runs").glob("*"):
        run = RunDir(folder)
        watchdog = read_watchdog(run)
        _end(watchdog.identity if watchdog is not None else None)
        record = read_processes(run)
        if record is not None:
            _end(record.runner)
            _end(record.trainer)
        for path in folder.glob("process_rank*.json"):
            _end(read_model(RankProcess, path).process)


def _end(identity: ProcessIdentity | None) -> None:
    """kill -9 of this very process, if it still runs."""
    if identity is not None and is_alive(identity):
        os.kill(identity.pid, signal.SIGKILL)
