"""Run modules under the Triton interpreter: a process each, since kernels ask on import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


class Interpreting:
    """A module beside this one whose kernels run under the interpreter, in a process of its own."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.core.kernels_triton.{module}"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> Any:
        """What it prints as JSON, once it has ended."""
        out, err = self._process.communicate()
        assert self._process.returncode == 0, err[-4000:]
        return json.loads(out)

    def end(self) -> None:
        """End it if nobody has waited for it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
