"""A loss that is too good is a suspicion; the causality probe settles it."""

import math
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.report import CheckResult, Report
from nsa_ops.pod import leak
from nsa_ops.pod.leak import CausalityProbe, read_causality, report_file
from tests.integration.pod_runs import wait_for
from tests.ops.pod.health import FACTS, beat, found, judged

GOOD = [beat(1, loss=11.0), *(beat(step, loss=0.01) for step in range(2, 6))]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def manifest() -> RunManifest:
    return RunManifest(run_id="r", config=RunConfig(), config_sha256="s", created_unix_s=1.0)


@pytest.mark.parametrize(
    ("causality", "rules"),
    [
        ("not probed", {"loss_too_good": "halt"}),
        ("unknown", {"loss_too_good": "halt"}),
        ("probing", {"loss_too_good": "warn"}),
        ("holds", {"loss_too_good": "warn"}),
        ("broken", {"causality_broken": "halt", "loss_too_good": "halt"}),
    ],
)
def test_the_probe_decides_what_a_loss_that_is_too_good_means(
    causality: str, rules: dict[str, str]
) -> None:
    assert found(judged(GOOD, facts=FACTS, causality=causality)) == rules


def test_broken_causality_halts_whatever_the_loss_does() -> None:
    verdict = judged([beat(step, loss=3.0) for step in range(1, 5)], causality="broken")
    assert (verdict.level, verdict.rule) == ("halt", "causality_broken")


def test_a_probe_runs_once_and_its_report_stays_in_the_run(
    run: RunDir, manifest: RunManifest
) -> None:
    probe = CausalityProbe(run, manifest, "tests.integration.fake_checks")
    assert probe.read() == "not probed"
    assert probe.start()
    assert not probe.start()
    wait_for(lambda: probe.read() != "probing")
    assert probe.read() == "broken"
    assert not CausalityProbe(run, manifest, "tests.integration.fake_checks").start()


def test_a_probe_without_a_result_is_unknown_and_a_slow_one_is_ended(
    run: RunDir, manifest: RunManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = CausalityProbe(run, manifest, "no.such.module")
    probe.start()
    wait_for(lambda: probe.read() == "unknown")
    report_file(run, 1).unlink()
    monkeypatch.setattr(leak, "PROBE_S", -math.inf)
    slow = CausalityProbe(run, manifest, "tests.integration.fake_checks")
    slow.start()
    assert slow.read() in {"unknown", "broken"}
    wait_for(lambda: slow._process.poll() is not None)


def test_a_report_is_read_by_its_causality_checks_alone(run: RunDir) -> None:
    file = report_file(run, 1)
    for checks, expected in (
        ({"causality.a": "pass", "parity.b": "fail"}, "holds"),
        ({"causality.a": "pass", "causality.b": "fail"}, "broken"),
        ({"parity.b": "pass"}, "unknown"),
    ):
        found = [CheckResult(name=n, status=s, message="") for n, s in checks.items()]
        file.write_text(Report(at=1.0, checks=found).model_dump_json())
        assert read_causality(file) == expected
    file.write_text("")
    assert read_causality(file) == "probing"
