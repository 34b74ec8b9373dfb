"""Read the commands that our own messages and docstrings name, without running any code."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.docs.markdown import REPOSITORY, Command

SOURCES = sorted(
    path for part in ("nsa_core", "nsa_ops") for path in (REPOSITORY / part).rglob("*.py")
)
#: A command in backticks, also behind a variable that it sets: `NAME=value nsa-ops status`.
_NAMED = re.compile(r"`(?:[^`\s]+ )?nsa-ops ([^`]+)`")


def named_commands(source: Path) -> Iterator[Command]:
    """Every `nsa-ops …` in backticks in a string of a module; a placeholder counts as a word."""
    content = source.read_text()
    if "nsa-ops" not in content:  # to parse them all takes seconds
        return
    for text in _strings(ast.parse(content)):
        for line in _NAMED.findall(text):
            words = tuple(word for word in shlex.split(line) if word != "--help")
            yield Command(str(source.relative_to(REPOSITORY)), f"nsa-ops {line}", words)


def _strings(tree: ast.AST) -> Iterator[str]:
    """String literals, each once; adjacent ones are one already."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            yield "".join(_piece(part) for part in node.values)
            waiting += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield node.value
        else:
            waiting += ast.iter_child_nodes(node)


def _piece(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "word"
