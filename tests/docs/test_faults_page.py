"""docs/faults.md names tests, each of which exists, and each kind of fault has one."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    files: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files.setdefault(path.name, set()).update(functions_of(path))
    missing = [f"{file}::{name}" for file, name in NAMED if name not in files.get(file, set())]
    assert missing == []


def test_every_fault_of_the_page_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "| fault" not in line]
    assert len(rows) > 35
    assert sum(row.count("::test_") for row in rows) == len(NAMED)
    assert [row for row in rows if "::test_" not in row] == []


def test_every_test_of_a_fault_is_on_the_page() -> None:
    shown = {name for _, name in NAMED}
    for path in (ROOT / "tests" / "integration").glob("test_faults_*.py"):
        hidden = {name for name in functions_of(path) if name.startswith("test_")} - shown
        assert hidden == set(), path.name
