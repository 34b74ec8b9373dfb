"""Names complete in the shell from this laptop's registry, for every command that takes one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main

from nsa_ops.cli.app import app
from nsa_ops.cli.arguments import (
    complete_pod,
    complete_pods,
    complete_profile,
    complete_recipe,
    complete_run,
)
from nsa_ops.store import REGISTRY_NAME, Store
from tests.ops.cli_case import CommandLine
from tests.ops.operators import POD
from tests.ops.runs.documents import RUN


def parameters(node: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every parameter of the command tree that is a name which this laptop can know."""
    for name, child in getattr(node, "commands", {}).items():
        yield from parameters(child, (*words, name))
    for parameter in node.params:
        kind = parameter.metavar or ""
        is_name = any(word in kind for word in ("RUN", "POD", "PROFILE"))
        if is_name or {"--profile", "--recipe"} & set(parameter.opts):
            yield " ".join((*words, parameter.name)), parameter


NAMES = dict(parameters(typer.main.get_command(app)))


@pytest.fixture
def known(own_settings: Path) -> Path:
    """A registry with two runs and a pod."""
    store = Store(own_settings / "state" / REGISTRY_NAME)
    store.add_pod(POD)
    store.save_run(RUN)
    store.save_run(replace(RUN, run_id="r2"))
    store.close()
    return own_settings / "state"


@pytest.mark.usefixtures("known")
def test_every_name_of_the_command_tree_completes() -> None:
    assert len(NAMES) > 40
    context = typer.Context(typer.main.get_command(app))
    silent = [name for name, one in NAMES.items() if not one.shell_complete(context, "")]
    assert silent == []


@pytest.mark.usefixtures("known")
def test_names_are_those_that_begin_so() -> None:
    assert complete_run("") == ["r2", "r1"]
    assert (complete_run("r1"), complete_run("x"), complete_pod("a")) == (["r1"], [], ["a100-1"])
    assert (complete_pods("b,a"), complete_pods("a100-1,")) == (["b,a100-1"], [])
    assert "a100" in complete_profile("a")
    assert complete_recipe("tiny") == ["tiny-cpu"]


def test_without_a_registry_nothing_is_made_and_nothing_is_said(own_settings: Path) -> None:
    assert complete_run("") == complete_pod("") == complete_pods("a,") == []
    assert not (own_settings / "state").exists()


def test_a_damaged_registry_completes_to_nothing(known: Path) -> None:
    (known / REGISTRY_NAME).write_bytes(b"no sqlite" * 1000)
    assert complete_run("") == []


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("line", "names"), [("nsa-ops status ", "r2\nr1\n"), ("nsa-ops preflight a", "a100-1\n")]
)
def test_the_shell_gets_the_names(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, line: str, names: str
) -> None:
    words = line.split(" ")
    monkeypatch.setenv("_NSA_OPS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    outcome = cli()
    assert (outcome.exit_code, outcome.out, outcome.err) == (0, names, "")
