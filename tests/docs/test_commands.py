"""Every nsa-ops command in our pages is one that the real command line accepts."""

from collections.abc import Sequence
from typing import Any

import pytest
import typer

from nsa_core.config.recipe import resolve
from nsa_ops.cli.app import app
from tests.docs.markdown import PAGES, Command, fenced_commands, inline_commands

FENCED = [command for page in PAGES for command in fenced_commands(page)]
INLINE = [command for page in PAGES for command in inline_commands(page)]


def parse(words: Sequence[str]) -> None:
    """Parse as the command line would, down to the last option, and run nothing.

    Raises:
        typer.TyperException: If a command, an option or a value is not accepted.
    """
    command: Any = typer.main.get_command(app)
    name, arguments, parent = "nsa-ops", list(words), None
    while True:
        context = command.make_context(name, arguments, parent=parent)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]  # where the parser keeps a subcommand
        if not rest:
            message = "a command is missing"
            raise typer.TyperException(message)
        name, command, arguments = command.resolve_command(context, rest)
        parent = context


def options(command: Command, name: str) -> list[str]:
    """Values of a repeatable option."""
    pairs = zip(command.words, command.words[1:], strict=False)
    return [value for option, value in pairs if option == name]


def identify(command: Command) -> str:
    return f"{command.page}: {command.line}"


@pytest.mark.parametrize("command", FENCED, ids=identify)
def test_a_fenced_command_parses(command: Command) -> None:
    parse(command.words)


@pytest.mark.parametrize(
    "command", [c for c in FENCED if "--recipe" in c.words or "--set" in c.words], ids=identify
)
def test_the_configuration_of_a_fenced_command_can_be_used(command: Command) -> None:
    recipe = (options(command, "--recipe") or ["m7c-125m"])[-1]
    explained = command.words[2] if command.words[:2] == ("profile", "explain") else None
    profile = (options(command, "--profile") or [explained])[-1]
    assert resolve(recipe, profile, options(command, "--set")).sha256


@pytest.mark.parametrize("command", INLINE, ids=identify)
def test_a_command_in_the_text_exists(command: Command) -> None:
    """Words in the text may leave out arguments, so only a wrong name or option counts."""
    try:
        parse(command.words)
    except typer.TyperException as error:
        assert "Missing " in error.format_message() or "a command is" in str(error)


@pytest.mark.parametrize(
    "line", ["lunch", "launch --profil a100", "backup pulled", "halt --and catch fire", "backup"]
)
def test_the_parser_refuses_what_does_not_exist(line: str) -> None:
    with pytest.raises(typer.TyperException):
        parse(line.split())


def test_the_pages_hold_commands() -> None:
    assert len(FENCED) > 60
    assert {command.page.split("/")[0] for command in FENCED} >= {"README.md", "runbooks"}
