"""A red test, a red check or no test at all makes .ci/run fail; only green exits 0.

The real script and Makefile run on a copy of the house with one test in it; the set-up and the
checks are stand-ins, and so is apt-get, so nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PASSES = "def test_passes():\n    assert True\n"
FAILS = "def test_fails():\n    assert False\n"
BREAKS = "raise RuntimeError('at import')\n"


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


@pytest.fixture
def house(tmp_path: Path, repository: Path) -> Path:
    root = tmp_path / "house"
    (root / ".ci").mkdir(parents=True)
    for name in (".ci/run", "Makefile", "pyproject.toml"):
        shutil.copy2(repository / name, root / name)
    executable(root / "tools/setup.sh", "#!/bin/sh\n")
    executable(root / "tools/check.sh", "#!/bin/sh\n")
    executable(root / "tools/engines.sh", "#!/bin/sh\n")
    executable(root / ".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    executable(tmp_path / "bin/apt-get", "#!/bin/sh\n")
    return root


def run_ci(house: Path, test_file: str) -> subprocess.CompletedProcess[str]:
    """Run it as a machine would that is not itself in the middle of a `make test`."""
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    environment["PATH"] = f"{house.parent / 'bin'}:{environment['PATH']}"
    environment["ARGS"] = "-n 0"  # one test needs one process
    (house / "tests").mkdir()
    (house / "tests/test_one.py").write_text(test_file)
    return subprocess.run(
        ["bash", ".ci/run"],
        cwd=house,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_a_passing_test_is_green_and_pytest_has_the_last_word(house: Path) -> None:
    done = run_ci(house, PASSES)
    assert done.returncode == 0, done.stderr
    assert "1 passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "test_file", [FAILS, BREAKS, ""], ids=["failing", "broken-at-import", "no-test-at-all"]
)
def test_anything_but_passing_tests_is_red(house: Path, test_file: str) -> None:
    assert run_ci(house, test_file).returncode != 0


def test_a_red_check_is_red_before_any_test_runs(house: Path) -> None:
    executable(house / "tools/check.sh", "#!/bin/sh\nexit 1\n")
    done = run_ci(house, PASSES)
    assert done.returncode != 0
    assert "passed" not in done.stdout


@pytest.mark.parametrize("script", ["setup.sh", "engines.sh"])
def test_a_failed_setup_is_red(house: Path, script: str) -> None:
    executable(house / "tools" / script, "#!/bin/sh\nexit 11\n")
    assert run_ci(house, PASSES).returncode != 0
