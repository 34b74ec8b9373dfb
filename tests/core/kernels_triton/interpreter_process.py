"""Run a module under the Triton interpreter: a process of its own, since kernels ask on import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def run_interpreted(module: str) -> Any:
    """What a module beside this one prints as JSON when its kernels run under the interpreter."""
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.core.kernels_triton.{module}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout)
