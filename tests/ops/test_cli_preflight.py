"""How a preflight ends for people and for scripts."""

import io
import json

import pytest
from rich.console import Console

from nsa_core.rundir.report import CheckResult, Report, Status
from nsa_ops.cli.console import draw_checks
from nsa_ops.preflight.preflight import Preflight, blocking_checks
from tests.ops.cli_case import CommandLine


def preflight(status: Status) -> Preflight:
    check = CheckResult(
        name="causality.perturbation", status=status, message="token 0 of 521 moved"
    )
    report = Report(at=1.0, profile="cpu", tier="standard", checks=[check])
    blocking = blocking_checks(report.checks)
    flags = " --recipe tiny-cpu --set model.dim=8"
    return Preflight("here", report, report.verdict, "sha", not blocking, blocking, flags)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(
        "nsa_ops.preflight.preflight.run_preflight", lambda *_: preflight(request.param)
    )


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("found", ["fail"], indirect=True)
def test_a_red_preflight_is_not_ok_for_a_script_either(cli: CommandLine) -> None:
    outcome = cli("preflight", "--json")
    document = json.loads(outcome.out)
    assert (outcome.exit_code, document["ok"]) == (3, False)
    assert [error["exit_code"] for error in document["errors"]] == [3]
    assert document["data"]["blocking"] == ["causality.perturbation", "causality (no probe passed)"]


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("found", ["fail"], indirect=True)
def test_a_red_preflight_ends_with_an_error_and_the_next_command(cli: CommandLine) -> None:
    outcome = cli("preflight")
    assert outcome.exit_code == 3
    assert "verdict: red because of causality.perturbation" in outcome.out
    assert outcome.err.startswith("error: The preflight of pod `here` is red: causality.pertur")
    same = "--profile cpu --recipe tiny-cpu --set model.dim=8"
    assert f"`nsa-ops preflight here {same}`" in outcome.err


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("found", ["pass"], indirect=True)
def test_a_green_preflight_is_ok(cli: CommandLine) -> None:
    outcome = cli("preflight", "--json")
    assert (outcome.exit_code, json.loads(outcome.out)["ok"], outcome.err) == (0, True, "")
    same = "--pod here --profile cpu --recipe tiny-cpu --set model.dim=8"
    assert f"`nsa-ops launch {same}`" in cli("preflight").out


def _drawn(width: int, *checks: CheckResult) -> str:
    console = Console(width=width, file=io.StringIO())
    draw_checks(console, checks)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_what_was_measured_once_and_its_limit() -> None:
    checks = [
        CheckResult(
            name="parity.selected", status="pass", message="sdpa in torch.float32: worst is dk",
            measured="3.1e-07 relative L2", limit="2e-05",
        ),
        CheckResult(
            name="host.python", status="pass", message="Python 3.11.2", measured="3.11.2",
            limit=">= 3.11",
        ),
    ]  # fmt: skip
    lines = _drawn(200, *checks).splitlines()
    assert "3.1e-07 relative L2: sdpa in torch.float32: worst is dk" in lines[1]
    assert lines[1].rstrip().endswith("2e-05")
    assert "Python 3.11.2 " in lines[2]
    assert ": Python" not in lines[2]


def test_the_table_can_be_read_on_100_columns() -> None:
    check = CheckResult(
        name="causality.perturbation", status="fail", measured="1 leaks in 12 cases",
        message="token 0 of 521 moved by 1.0e-03 and many more words that need a second line",
        limit=">= 4.1389 nats (ln 64 - 0.02)",
    )  # fmt: skip
    lines = _drawn(100, check, check).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("causality.perturbation" in text for text in lines) == 2
    assert "1 leaks in 12 cases: token 0" in lines[1]
