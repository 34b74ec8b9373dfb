"""tools/check.sh runs every tool, fails when one of them does, and names it."""

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = {
    "ruff format": "format",
    "ruff check": "lint",
    "mypy": "types",
    "lint-imports": "layers",
    "shellcheck": "shell",
    "hadolint": "image",
}

STAND_IN = """#!/bin/sh
case "$(basename "$0") $*" in
"{failing}"*) exit 1 ;;
esac
"""


def run_check(root: Path, repository: Path, failing: str) -> subprocess.CompletedProcess[str]:
    (root / "tools").mkdir()
    shutil.copy2(repository / "tools/check.sh", root / "tools")
    (root / ".venv/bin").mkdir(parents=True)
    for tool in TOOLS:
        stand_in = root / ".venv/bin" / tool.split()[0]
        stand_in.write_text(STAND_IN.replace("{failing}", failing))
        stand_in.chmod(0o755)
    return subprocess.run([root / "tools/check.sh"], capture_output=True, text=True, check=False)


def test_all_green_is_green(tmp_path: Path, repository: Path) -> None:
    done = run_check(tmp_path, repository, "nothing")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"{name}: ok" for name in TOOLS.values()]


@pytest.mark.parametrize("failing", TOOLS)
def test_one_red_tool_is_red_and_named(failing: str, tmp_path: Path, repository: Path) -> None:
    done = run_check(tmp_path, repository, failing)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"failed: {TOOLS[failing]}"
    assert done.stdout.count(": ok") == len(TOOLS) - 1
