"""Run a module under the Triton interpreter, in a process of its own: kernels ask on import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, repository: Path) -> Any:
    """What the module named by `INTERPRETED` of a test module printed as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.core.kernels_triton.{request.module.INTERPRETED}"],
        cwd=repository,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
