"""Every nsa-ops command that a message of the code names is one that the command line accepts."""

from pathlib import Path

import pytest
import typer

from tests.docs.hints import SOURCES, named_commands
from tests.docs.markdown import Command
from tests.docs.test_commands import identify, parse

NAMED = sorted({command for source in SOURCES for command in named_commands(source)}, key=identify)


@pytest.mark.parametrize("command", NAMED, ids=identify)
def test_a_command_that_the_code_names_exists(command: Command) -> None:
    """A message may leave out arguments and options; only a wrong name, option or value counts."""
    try:
        parse(command.words)
    except typer.TyperException as error:
        assert "Missing " in error.format_message() or "a command is" in str(error)


def test_placeholders_and_adjacent_literals_are_read_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.docs.hints.REPOSITORY", tmp_path)
    source = tmp_path / "some.py"
    source.write_text(
        "hint = (f'End it: `{state} nsa-ops halt '\n  f'{run.name}` or `nsa-ops x`')\n"
    )
    assert [command.words for command in named_commands(source)] == [("halt", "word"), ("x",)]


def test_the_code_names_commands() -> None:
    assert len(NAMED) > 40
    assert {command.page.split("/")[0] for command in NAMED} == {"nsa_core", "nsa_ops"}
