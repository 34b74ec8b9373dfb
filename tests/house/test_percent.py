"""One form of a percentage in all that people see: `18 %`, a number, a space and the sign."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

#: A digit or a figure of an f-string (shown as `1`) with the sign behind it, and no letter after
#: that, as `%d` of a format has one.
_TOUCHING = re.compile(r"[0-9]%(?![\w(])")
#: What makes columns of a table passes shares as `.1%` to `Column`, which writes the space.
_COLUMN_FORM = re.compile(r"\.[0-9]%")


def percentages(source: str) -> Iterator[str]:
    """Texts of a module in which a percent sign touches its number, or that let Python write it."""
    pieces: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            pieces |= set(ast.walk(node.format_spec))
            if ast.unparse(node.format_spec).strip("f'\"").endswith("%"):
                yield ast.unparse(node)
        elif isinstance(node, ast.JoinedStr) and node not in pieces:
            pieces |= set(node.values)
            parts = [one.value if isinstance(one, ast.Constant) else "1" for one in node.values]
            if _TOUCHING.search("".join(map(str, parts))):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node not in pieces:
            text = str(node.value)
            if _TOUCHING.search(text) and not _COLUMN_FORM.fullmatch(text):
                yield text


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('f"{share:.0%} of it"', True),
        ('f"{share:>8.1%}"', True),
        ('f"{share}% of it"', True),
        ('"keep 18% free"', True),
        ('f"{100 * share:.0f} % of it, {number:,}"', False),
        ('"keep 18 % free"', False),
        ('Column("spread", 7, "spread", ".1%")', False),
        ('"step_%06d", "a %s b 1%s"', False),
        ("number % 8", False),
    ],
)
def test_a_planted_percentage_is_found(source: str, *, is_found: bool) -> None:
    assert bool(list(percentages(source))) == is_found


@pytest.mark.parametrize("package", ["nsa_ops", "nsa_core"])
def test_code_writes_a_space_before_the_percent_sign(repository: Path, package: str) -> None:
    found = {
        str(path.relative_to(repository)): texts
        for path in sorted((repository / package).rglob("*.py"))
        if (texts := list(percentages(path.read_text())))
    }
    assert found == {}


def test_pages_write_a_space_before_the_percent_sign(repository: Path) -> None:
    pages = [*repository.glob("*.md"), *repository.glob("docs/*.md")]
    pages += [*repository.glob("runbooks/*.md"), *repository.glob("profiles/*.yaml")]
    found = {page.name: _TOUCHING.findall(page.read_text()) for page in pages}
    assert {name: texts for name, texts in found.items() if texts} == {}
