"""ARCHITECTURE.md follows one loss and one checkpoint through functions that exist."""

import ast
import re

import pytest

from tests.docs.markdown import REPOSITORY

#: ``1. `nsa_core/train/step.py: StepRunner._finish` …``
_HOP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)` ", re.MULTILINE)
_MOST_HOPS = 12


def hops(title: str) -> list[tuple[str, str]]:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text()
    found = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    assert len(_HOP.findall(found)) == len(re.findall(r"^\d+\. ", found, re.MULTILINE)), title
    return _HOP.findall(found)


def defines(tree: ast.AST, name: str) -> bool:
    """Whether a module has this function, or `Class.method`."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return defines(node, rest) if rest else isinstance(node, ast.FunctionDef)
    return False


@pytest.mark.parametrize("title", ["The path of one loss value", "The path of one checkpoint"])
def test_each_path_is_short_and_names_functions_that_exist(title: str) -> None:
    found = hops(title)
    assert 3 < len(found) <= _MOST_HOPS
    missing = [
        f"{file}: {name}"
        for file, name in found
        if not (REPOSITORY / file).is_file()
        or not defines(ast.parse((REPOSITORY / file).read_text()), name)
    ]
    assert not missing, f"ARCHITECTURE.md, {title}: write where these are now"
