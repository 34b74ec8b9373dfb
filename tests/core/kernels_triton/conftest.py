"""Run a module under the Triton interpreter, in a process of its own: kernels ask on import."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: How an interpreter that is older than its numpy ends, for every kernel.
NOT_BY_NUMPY = "only 0-dimensional arrays can be converted to Python scalars"


def pytest_collection_modifyitems(items) -> None:
    """The first test of a module waits for all of its cases: minutes on a busy machine."""
    for item in items:
        if "interpreted" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1200))


def wanted_cases(request: pytest.FixtureRequest) -> list[str]:
    """The cases of the chosen tests of a module; an empty list, if one of them needs all."""
    tests = [item for item in request.session.items if item.path == request.path]
    cases = [getattr(test, "callspec", None) and test.callspec.params.get("case") for test in tests]
    return sorted(set(cases)) if all(cases) else []


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, repository: Path) -> Any:
    """What the module named by `INTERPRETED` of a test module printed as JSON."""
    runner = f"{__package__}.interpret"
    done = subprocess.run(
        [sys.executable, "-m", runner, request.module.INTERPRETED, *wanted_cases(request)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    if NOT_BY_NUMPY in done.stderr:
        triton, numpy = (importlib.metadata.version(name) for name in ("triton", "numpy"))
        message = f"Triton {triton} cannot interpret kernels with numpy {numpy}: docs/kernels.md"
        pytest.fail(message, pytrace=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
