"""A green preflight says for which model and kernels it is green."""

from typing import Any

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.report import Report
from nsa_ops.preflight.probed import PROBED, note_another_probed, probed_sha256


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(changes)


def report(proven: RunConfig | None) -> Report:
    extra = {PROBED: probed_sha256(proven)} if proven else {}
    return Report.model_validate({"at": 1.0, "checks": [], **extra})


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"num_layers": 3}},
        {"runtime": {"precision": "fp32"}},
        {"runtime": {"backend_selected": "sdpa"}},
        {"runtime": {"compile": True}},
    ],
)
def test_another_model_or_kernel_is_noticed(other: dict[str, Any]) -> None:
    (note,) = note_another_probed(report(config()), config(**other))
    assert "nsa-ops preflight --recipe" in note


def test_what_does_not_change_the_mathematics_is_not() -> None:
    other = config(schedule={"steps": 7, "warmup_steps": 1}, seed=9)
    assert note_another_probed(report(config()), other) == []
    assert note_another_probed(report(None), other) == []
    assert note_another_probed(None, other) == []
