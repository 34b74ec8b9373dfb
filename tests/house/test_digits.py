"""Numbers of others are read by `parse_count`: `isdigit` takes what `int` refuses."""

import ast
from pathlib import Path

_TESTS_OF_DIGITS = {"isdigit", "isdecimal", "isnumeric"}


def test_no_text_of_others_becomes_a_number_by_isdigit(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{node.lineno}"
        for path in sorted((repository / "nsa_ops").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in _TESTS_OF_DIGITS
    ]
    assert found == []
