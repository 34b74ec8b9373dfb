"""What the code imports is what pyproject.toml asks for: nothing comes along by accident."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = {"nsa_core", "nsa_ops"}
#: Never locked: source-only, on pods alone, and its absence is a recorded fact.
ON_PODS_ONLY = {"flash_attn"}


def imported(folder: Path) -> dict[str, str]:
    """Top-level names that the code below a folder imports, and one file that does."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found |= {name.split(".")[0]: str(path) for name in names}
    return found


def declared(repository: Path, package: str) -> set[str]:
    """Distributions that a package may count on."""
    project: dict[str, Any] = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = {"nsa_ops": extras["fabric"], "nsa_core": extras["train"]}
    asked = [*project["dependencies"], *lists[package]]
    return {canonicalize_name(Requirement(text).name) for text in asked}


@pytest.mark.parametrize("package", sorted(OURS))
def test_every_import_is_declared(package: str, repository: Path) -> None:
    distributions = packages_distributions()
    allowed = declared(repository, package)
    undeclared = {
        name: path
        for name, path in imported(repository / package).items()
        if name not in OURS | ON_PODS_ONLY | sys.stdlib_module_names
        and not {canonicalize_name(d) for d in distributions.get(name, [])} & allowed
    }
    assert undeclared == {}
