"""How a preflight ends for people and for scripts."""

import json

import pytest

from nsa_core.rundir.report import CheckResult, Report, Status
from nsa_ops.runs.preflight import Preflight, blocking_checks
from tests.ops.cli_case import CommandLine


def preflight(status: Status) -> Preflight:
    check = CheckResult(
        name="causality.perturbation", status=status, message="token 0 of 521 moved"
    )
    report = Report(at=1.0, profile="cpu", checks=[check])
    blocking = blocking_checks(report.checks)
    return Preflight("here", report, report.verdict, "sha", not blocking, blocking)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr("nsa_ops.runs.preflight.run_preflight", lambda *_: preflight(request.param))


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
    assert "nsa-ops preflight here --profile cpu" in outcome.err


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("found", ["pass"], indirect=True)
def test_a_green_preflight_is_ok(cli: CommandLine) -> None:
    outcome = cli("preflight", "--json")
    assert (outcome.exit_code, json.loads(outcome.out)["ok"], outcome.err) == (0, True, "")
