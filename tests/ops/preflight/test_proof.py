"""What a preflight proves of the kernels is what the manifest records, and nothing else."""

from typing import Any

import pytest

from nsa_core.config.backend_policy import policy_text
from nsa_core.config.recipe import resolve
from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import KernelChoice
from nsa_core.rundir.report import CheckResult, Report
from nsa_ops.errors import RefusedError
from nsa_ops.preflight.proof import (
    PROBED,
    note_another_probed,
    probed_sha256,
    proven_kernels,
    require_proven,
)


def config(*sets: str, recipe: str = "m7c-125m") -> RunConfig:
    return resolve(recipe, "h100", list(sets)).config


def report_for(probed: RunConfig, *branches: str) -> Report:
    checks = [
        CheckResult(
            name=f"kernels.{branch}", status="pass", measured="triton", message="the fastest",
            limit=policy_text(probed, branch),  # type: ignore[arg-type]
        )
        for branch in branches
    ]  # fmt: skip
    return Report(at=0.0, checks=checks)


NSA = ("compressed", "selected", "sliding")


def test_proven_backends_are_recorded_with_their_reason() -> None:
    proven = proven_kernels(config(), report_for(config(), *NSA))
    assert proven == dict.fromkeys(NSA, KernelChoice(name="triton", reason="the fastest"))


def test_another_length_or_batch_is_the_same_proof() -> None:
    longer = config("batch.seq_len=8192", "schedule.steps=7")
    assert set(proven_kernels(longer, report_for(config(), *NSA))) == set(NSA)


@pytest.mark.parametrize(
    "change",
    [
        "runtime.backend_selected=triton",
        "runtime.precision=fp32",
        "model.head_dim_v=128",
        "model.nsa.select_block=48",
        "batch.seq_len=2796203",
    ],
)
def test_another_policy_precision_or_width_is_not_proven(change: str) -> None:
    proven = proven_kernels(config(change), report_for(config(), *NSA))
    assert "selected" not in proven


def test_a_length_at_which_flash_begins_is_not_proven_by_a_shorter_one() -> None:
    flag = "runtime.flash_min_len_sliding=4096"
    short, long = config(flag), config(flag, "batch.seq_len=8192")
    assert set(proven_kernels(long, report_for(short, *NSA))) == {"compressed", "selected"}


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_kernels_that_are_named_and_unproven_are_refused_with_the_next_command(
    backend: str,
) -> None:
    named = config(f"runtime.backend_sliding={backend}")
    proven = proven_kernels(named, report_for(config(), *NSA))
    assert "sliding" not in proven
    with pytest.raises(RefusedError, match=f"{backend} for the sliding branch") as caught:
        require_proven(named, proven)
    assert "nsa-ops preflight" in caught.value.hint


def test_named_kernels_that_were_proven_and_sdpa_may_be_launched() -> None:
    named = config("runtime.backend_sliding=triton")
    require_proven(named, proven_kernels(named, report_for(named, *NSA)))
    sdpa = config("runtime.backend=sdpa")
    require_proven(sdpa, proven_kernels(sdpa, None))
    dense = config(recipe="dense-125m")
    require_proven(dense, proven_kernels(dense, report_for(config(), *NSA)))


def changed(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(changes)


def report_of(proven: RunConfig | None) -> Report:
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
    (note,) = note_another_probed(report_of(changed()), changed(**other))
    assert "nsa-ops preflight --recipe" in note


def test_a_change_that_leaves_the_mathematics_alone_is_not_noticed() -> None:
    other = changed(schedule={"steps": 7, "warmup_steps": 1}, seed=9)
    assert note_another_probed(report_of(changed()), other) == []
    assert note_another_probed(report_of(None), other) == []
    assert note_another_probed(None, other) == []
