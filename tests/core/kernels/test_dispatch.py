"""Policy and capability decide; nothing falls back in silence."""

import importlib

import pytest
import torch

from nsa_core.config.backend_policy import branch_policy
from nsa_core.config.training import RuntimeConfig
from nsa_core.kernels import dispatch
from nsa_core.kernels.backend import DeviceFacts

CPU = DeviceFacts("cpu", None, torch.float32)


def test_auto_on_a_cpu_is_sdpa_and_says_why():
    chosen = dispatch.choose_backends(RuntimeConfig(), CPU)
    assert [choice.name for choice in chosen.choices] == ["sdpa"] * 3
    assert all("triton needs a CUDA device" in choice.reason for choice in chosen.choices)


def test_on_a_cpu_only_sdpa_is_imported(monkeypatch):
    imported, plain = [], importlib.import_module

    def spy(name):
        imported.append(name)
        return plain(name)

    monkeypatch.setattr(importlib, "import_module", spy)
    dispatch.choose_backends(RuntimeConfig(), CPU)
    assert set(imported) == {"nsa_core.kernels.sdpa"}


@pytest.mark.parametrize("name", ["triton", "flash"])
def test_a_named_backend_that_cannot_run_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*selected.*CUDA device.*cpu"):
        dispatch.choose_backends(RuntimeConfig(backend_selected=name), CPU)


def test_a_branch_overrides_the_common_backend():
    with pytest.raises(ValueError, match="compressed"):
        dispatch.choose_backends(RuntimeConfig(backend="triton", backend_sliding="sdpa"), CPU)
    runtime = RuntimeConfig(backend="sdpa")
    reasons = {choice.reason for choice in dispatch.choose_backends(runtime, CPU).choices}
    assert reasons == {"named by the configuration (runtime.backend)"}


def test_a_missing_module_is_named(monkeypatch):
    missing = "nsa_core.kernels.absent"
    monkeypatch.setitem(dispatch.BACKEND_MODULES, "flash", missing)
    facts = DeviceFacts("cuda", (8, 0), torch.bfloat16)
    policy = branch_policy(RuntimeConfig(backend_sliding="flash"), "sliding", None)
    with pytest.raises(ValueError, match=missing):
        dispatch.choose_backend(policy, facts)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 0), "sdpa"),
        ((7, 5), "sdpa"),
        ((8, 0), "triton"),
        ((8, 9), "triton"),
        ((9, 0), "triton"),
    ],
)
def test_auto_follows_the_architecture_and_says_why_not(capability, name):
    facts = DeviceFacts("cuda", capability, torch.float16)
    for choice in dispatch.choose_backends(RuntimeConfig(), facts).choices:
        assert choice.name == name
        if name == "sdpa":
            assert f"sm_{capability[0]}{capability[1]}" in choice.reason


def test_float32_on_a_card_is_sdpa_because_of_the_dtype():
    facts = DeviceFacts("cuda", (9, 0), torch.float32)
    for choice in dispatch.choose_backends(RuntimeConfig(), facts).choices:
        assert (choice.name, "torch.float32" in choice.reason) == ("sdpa", True)
