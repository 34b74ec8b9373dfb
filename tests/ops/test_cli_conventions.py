"""What holds for every command: its options, its start-up cost, and what it imports."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from nsa_ops.cli.app import app
from tests.ops.cli_case import CommandLine

_EVERYWHERE = {"--json", "--timeout", "--no-input", "--verbose", "-v", "--quiet", "-q", "--color"}
_HEAVY = {
    "torch", "triton", "numpy", "pydantic", "yaml", "rich", "fabric", "paramiko", "invoke",
    "datasets", "sqlite3", "nsa_core",
}  # fmt: skip
_CPU_LIMIT_S = 0.25


def _walk(node: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(node, "commands", {}).items():
        if getattr(child, "commands", None):
            yield from _walk(child, (*words, name))
        else:
            yield " ".join((*words, name)), child


COMMANDS = dict(_walk(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_takes_the_common_options(words: str) -> None:
    flags = {flag for parameter in COMMANDS[words].params for flag in parameter.opts}
    assert flags >= _EVERYWHERE


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_that_asks_also_shows_its_plan(words: str) -> None:
    flags = {flag for parameter in COMMANDS[words].params for flag in parameter.opts}
    assert ("--yes" in flags) == ("--plan" in flags)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_and_option_says_what_it_is_for(words: str) -> None:
    command = COMMANDS[words]
    assert command.help
    assert command.help.splitlines()[0].endswith(".")


@pytest.mark.parametrize("words", COMMANDS)
def test_settings_are_checked_before_anything_is_shown_or_done(
    words: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, own_settings: Path
) -> None:
    monkeypatch.setenv("NSA_OPS_TIMEOUT_S", "soon")
    monkeypatch.chdir(own_settings)
    needed = [
        word
        for parameter in COMMANDS[words].params
        if parameter.required
        for word in (*parameter.opts[: parameter.param_type_name == "option"], "x")
    ]
    before = sorted(own_settings.rglob("*"))
    outcome = cli(*words.split(), *needed)
    if words == "doctor":  # its work is to name what is wrong
        assert "soon" in outcome.out
        return
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert outcome.err.startswith(
        "error: Setting `timeout_s` from NSA_OPS_TIMEOUT_S cannot be used: "
    )
    assert "'soon'" in outcome.err
    assert sorted(own_settings.rglob("*")) == before


def _run_fresh(code: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.splitlines()[-1])


_MEASURE = """
import json, sys, time, io, contextlib
sys.argv = ["nsa-ops", "--help"]
with contextlib.redirect_stdout(io.StringIO()):
    from nsa_ops.cli.app import main
    try:
        main()
    except SystemExit:
        pass
print(json.dumps({"cpu_s": time.process_time(), "modules": sorted(sys.modules)}))
"""


#: What `--help` cannot do without.
_LIBRARIES = """
import json, time
import rich.console, rich.panel, rich.table, typer
print(json.dumps({"cpu_s": time.process_time()}))
"""


def test_help_is_quick_and_loads_nothing_heavy(
    record_property: Callable[[str, object], None],
) -> None:
    # The best of five: the time of another process on this machine is not ours. Where every start
    # is slow, because others use the processor, twice the time of the libraries alone is allowed.
    measured = [_run_fresh(_MEASURE) for _ in range(5)]
    loaded = {name.partition(".")[0] for name in measured[0]["modules"]}
    best_s = min(run["cpu_s"] for run in measured)
    record_property("help_cpu_s", round(best_s, 3))
    assert not loaded & _HEAVY
    libraries_s = min(_run_fresh(_LIBRARIES)["cpu_s"] for _ in range(5))
    assert best_s <= max(_CPU_LIMIT_S, 2 * libraries_s)


def test_a_bare_call_prints_the_help(cli: CommandLine) -> None:
    outcome = cli()
    assert outcome.exit_code == 0
    assert outcome.out.startswith("Usage: nsa-ops")


def test_the_version_is_printed(cli: CommandLine) -> None:
    assert cli("--version").out.startswith("nsa-ops 0.")
