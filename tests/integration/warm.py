"""Run `nsa-ops` in processes forked from one that has imported it, for tests that type a lot."""

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_ops.remote.snapshot import code_root


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    exit_code: int
    out: bytes
    err: str

    @property
    def data(self) -> Any:
        """The data of a JSON envelope."""
        return json.loads(self.out)["data"]


@functools.cache
def _start(module: str, *words: str) -> subprocess.Popen[bytes]:
    """A server; it ends with this process, which holds the other end of its stdin."""
    return subprocess.Popen(
        (sys.executable, "-m", f"tests.integration.{module}", *words),
        cwd=code_root(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip


@functools.cache
def agent_server() -> str:
    """The socket where the pod's agents are asked."""
    place = Path(tempfile.mkdtemp(prefix="nsa-agents-")) / "socket"
    atexit.register(shutil.rmtree, place.parent)
    _start("warm_agent", str(place))
    end = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return str(place)


def run_warm(
    words: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
    terminal: str = "",
) -> Said:
    """One command from its words to its end, in a session of its own.

    Args:
        words: What is typed after `nsa-ops`.
        folder: Current folder.
        environment: All of its variables.
        limit_s: Its process group is ended then, and the test fails.
        terminal: Path of a terminal that is its stdin, stdout and stderr; nothing is kept then.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-warm-") as place:
        files = {name: Path(place) / name for name in ("out", "err", "result")}
        asked = {name: str(path) for name, path in files.items()} | {
            "words": list(words),
            "folder": str(folder),
            "environment": dict(environment),
            "limit_s": limit_s,
            "terminal": terminal,
        }
        pipe = _start("warm_command").stdin
        assert pipe is not None
        pipe.write(json.dumps(asked).encode() + b"\n")
        pipe.flush()
        end = time.monotonic() + limit_s + 10
        while not files["result"].exists():
            assert time.monotonic() < end, words
            time.sleep(0.005)
        found = json.loads(files["result"].read_text())
        assert not found["is_late"], f"{words} took longer than {limit_s} s"
        out, err = (b"" if terminal else files[name].read_bytes() for name in ("out", "err"))
        return Said(found["code"], out, err.decode())
