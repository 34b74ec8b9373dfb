"""A pod's own tools: asked with deadlines, judged, and what they refuse is reported."""

import os
import shlex
from pathlib import Path

import pytest

from nsa_core.config.profile import load_profile
from nsa_core.rundir.report import CheckResult
from nsa_ops.errors import DeadlineError, NotFoundError
from nsa_ops.machine import hardware
from nsa_ops.machine.hardware import (
    CARDS,
    KERNEL_LOG,
    LINKS,
    MODULE,
    HardwareFacts,
    judge_hardware,
    read_cards,
    read_hardware,
)
from nsa_ops.remote.local import LocalTransport
from tests.ops.fakes import FakeTransport, completed
from tests.ops.gpu import samples


def test_a_machine_with_two_cards_is_asked_for_everything() -> None:
    transport = FakeTransport(
        {"-q -x": completed(samples.XML), "topo -m": completed(samples.TOPOLOGY),
         "topo -p2p r": completed(""), "nvlink": completed(""), "lspci": completed(""),
         "dmesg": completed(samples.KERNEL)}
    )  # fmt: skip
    facts = read_hardware(transport)
    assert transport.asked == [CARDS, *LINKS, KERNEL_LOG]
    assert (len(facts.gpus), facts.problem, facts.unread) == (2, "", ())


def test_a_missing_nvidia_smi_and_a_hanging_one_are_distinguished() -> None:
    missing = read_hardware(FakeTransport({"nvidia-smi": NotFoundError("gone")}))
    assert missing.problem == "nvidia-smi is missing"
    transport = FakeTransport({"nvidia-smi": DeadlineError("late")})
    hanging = read_hardware(transport)
    assert "did not answer within 20 s" in hanging.problem
    assert [one.is_hung for one in hanging.unread] == [True, False]
    assert transport.asked == [CARDS, KERNEL_LOG]


def test_a_broken_driver_is_quoted_and_its_module_is_asked() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    transport = FakeTransport(
        {"nvidia-smi": completed(f"{said}\n", exit_code=18),
         "cat": completed("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.1.2  Tue\n")}
    )  # fmt: skip
    facts = read_hardware(transport)
    assert facts.problem == f"nvidia-smi said: {said}"
    assert MODULE in transport.asked
    assert facts.outputs[1].versions.module == "550.1.2"


def test_a_kernel_log_that_may_not_be_read_is_reported() -> None:
    refused = completed("", exit_code=1, stderr="dmesg: read kernel buffer failed: not permitted\n")
    facts = read_hardware(FakeTransport({"-q -x": completed(samples.QUERY), "dmesg": refused}))
    assert facts.unread[0].reason == "dmesg: read kernel buffer failed: not permitted"


def test_before_a_launch_only_the_cards_are_asked() -> None:
    transport = FakeTransport({"-q -x": completed(samples.XML)})
    assert len(read_cards(transport).gpus) == 2
    assert transport.asked == [CARDS]


def _fake_smi(folder: Path, script: str) -> LocalTransport:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return LocalTransport({"PATH": f"{folder}:{os.environ['PATH']}"})


def test_a_real_tool_that_sleeps_is_left_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "SMI_S", 0.3)
    facts = read_hardware(_fake_smi(tmp_path, "sleep 300"))
    assert facts.problem == "`nvidia-smi -q -x` did not answer within 0.3 s"
    assert facts.gpus == ()


def test_a_real_tool_on_the_path_is_read(tmp_path: Path) -> None:
    (tmp_path / "cards.xml").write_text(samples.XML)
    transport = _fake_smi(tmp_path, f"cat {shlex.quote(str(tmp_path / 'cards.xml'))}")
    assert [card.uuid for card in read_cards(transport).gpus] == ["GPU-aaaa", "GPU-bbbb"]


def test_a_profile_without_cards_judges_none_of_the_pods() -> None:
    found = judge_hardware(HardwareFacts(problem="nvidia-smi is missing"), load_profile("cpu"))
    assert [(one.name, one.status) for one in found] == [("gpu.cards", "skipped")]


def live(answers: dict[str, object]) -> list[CheckResult]:
    transport = FakeTransport(answers)  # type: ignore[arg-type]
    return judge_hardware(read_hardware(transport), load_profile("a100"))


def test_a_pod_is_judged_by_its_own_tools() -> None:
    found = live({"-q -x": completed(samples.XML), "topo": completed(samples.TOPOLOGY)})
    by_name = {one.name: one.status for one in found}
    assert by_name["gpu1.retired_pages"] == "fail"
    assert by_name["gpu.topology"] == "warn"
    assert by_name["tool.dmesg"] == "skipped"


def test_a_driver_that_hangs_is_a_failure_of_its_own() -> None:
    found = live({"nvidia-smi": DeadlineError("late")})
    assert found[0].status == "fail"
    assert "driver not answering" in found[0].message
