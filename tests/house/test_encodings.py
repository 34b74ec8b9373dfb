"""Files are read and written as UTF-8, never in the encoding of somebody's locale."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Things that are opened and are no text files.
OTHERS = {"os", "connection", "forward", "tarfile", "_board"}
BAD = {
    "path.read_text()": True,
    "path.read_text('utf-8')": False,
    "path.write_text(text)": True,
    "path.write_text(text, encoding='utf-8')": False,
    "write_text(path, text)": False,
    "open(path)": True,
    "path.open()": True,
    "path.open('a')": True,
    "path.open('ab')": False,
    "path.open(newline='')": True,
    "os.fdopen(descriptor, 'w')": True,
    "os.fdopen(descriptor, 'wb')": False,
    "os.open(path, flags)": False,
    "connection.open()": False,
    "subprocess.run(words, text=True)": True,
    "subprocess.run(words, encoding='utf-8')": False,
}


def find_calls(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each call that reads or writes text in the locale's encoding."""
    if not re.search(r"open\(|_text\(|text=|universal", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _uses_locale(node):
            yield node.lineno, ast.unparse(node)


def _uses_locale(call: ast.Call) -> bool:
    words = {word.arg for word in call.keywords}
    if "encoding" in words:
        return False
    name, owner = _names(call.func)
    if owner and name == "read_text":
        return not call.args
    if owner and name == "write_text":
        return len(call.args) < 2
    if name == "fdopen" or (name == "open" and owner not in OTHERS):
        return not any("b" in mode for mode in _modes(call))
    return bool(words & {"text", "universal_newlines"}) and name in {"run", "Popen", "check_output"}


def _names(function: ast.expr) -> tuple[str, str]:
    """Name of what is called and of what it belongs to; `?` where that has no name."""
    if isinstance(function, ast.Name):
        return function.id, ""
    if not isinstance(function, ast.Attribute):
        return "", ""
    owner = function.value
    return function.attr, getattr(owner, "id", getattr(owner, "attr", "?"))


def _modes(call: ast.Call) -> list[str]:
    given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    return [
        one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


@pytest.mark.parametrize("line", BAD)
def test_the_rule_sees_what_follows_the_locale(line: str) -> None:
    assert bool(list(find_calls(line))) == BAD[line]


def test_no_file_of_the_product_follows_the_locale() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for package in ("nsa_core", "nsa_ops")
        for path in (ROOT / package).rglob("*.py")
        for line, call in find_calls(path.read_text(encoding="utf-8"))
    ]
    assert found == []
